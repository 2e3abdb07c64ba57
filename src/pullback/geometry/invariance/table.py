"""From mismatches to a verdict.

    m(η) = ‖ψ(θ₁) − φ(w₁)‖ / ‖φ(w₁) − φ(w₀)‖       after one step of size η in both coordinates
    m(0) = ‖dψ Δθ − dφ Δw‖ / ‖dφ Δw‖                of the steps' directions, by differentials

are mismatches of the *update*. An exactly invariant method has both at the level of round-off, at
every size and along several steps; one that is invariant to first order only m(0), and then
m(η) ∝ η for small η; for one that depends on coordinates m(0) does not vanish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..._core.errors import PullbackError


@dataclass(frozen=True)
class Thresholds:
    """How mismatches are told from round-off."""

    #: how far above the measured round-off a mismatch still counts as none. In the record of the
    #: experiment invariance-audit, 5,800 mismatches of exact agreement are at most 12 times their
    #: round-off, and 1,139 of disagreement at least five million times (Muon aside, which works in
    #: lower precision).
    slack: float = 100.0
    #: a round-off, with its slack, above which agreement cannot be claimed: a mismatch of 5 % of
    #: the update would stay unseen
    blind: float = 0.05
    #: a round-off, with its slack, at which larger steps need not be looked at: a mismatch of a
    #: thousandth of the update is seen
    clear: float = 1e-3


THRESHOLDS = Thresholds()


class Verdict(Enum):
    """What an audit found; the value is what tables show."""

    EXACT = "exact"
    FIRST_ORDER = "first order"
    NOT = "not invariant"
    UNDECIDED = "undecided"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class UpdateMismatch:
    """A relative mismatch, and how much of it round-off alone would explain."""

    mismatch: float
    roundoff: float

    @property
    def is_roundoff(self) -> bool:
        """True if round-off explains the mismatch."""
        return self.mismatch <= THRESHOLDS.slack * self.roundoff

    @property
    def is_resolved(self) -> bool:
        """True if round-off is small enough to claim agreement."""
        return THRESHOLDS.slack * self.roundoff <= THRESHOLDS.blind


@dataclass(frozen=True)
class Measure:
    """Mismatch of one quantity: outputs at the batch or at probes, or parameters.

    Attributes:
        sizes: η, as multiples of the optimizer's own lr, largest first.
        steps: m(η) after one step, for each size.
        direction: m(0).
        long_run: the mismatch after 1, 2, … steps of full size.

    >>> steps = (UpdateMismatch(0.3, 1e-15), UpdateMismatch(0.03, 1e-15))
    >>> measure = Measure((1.0, 0.1), steps, UpdateMismatch(1e-14, 1e-15), ())
    >>> measure.verdict, measure.order
    (<Verdict.FIRST_ORDER: 'first order'>, 1.0)
    """

    sizes: tuple[float, ...]
    steps: tuple[UpdateMismatch, ...]
    direction: UpdateMismatch
    long_run: tuple[UpdateMismatch, ...]

    @property
    def verdict(self) -> Verdict:
        """Return how invariant the update is; `Verdict.UNDECIDED` where round-off hides it."""
        if not self.direction.is_roundoff:
            return Verdict.NOT
        if not self.direction.is_resolved:
            return Verdict.UNDECIDED
        if all(step.is_roundoff for step in (*self.steps, *self.long_run)):
            return Verdict.EXACT
        return Verdict.FIRST_ORDER

    @property
    def order(self) -> float | None:
        """d log m / d log η at the two smallest sizes that show it; None where none do."""
        visible = [
            (size, step.mismatch)
            for size, step in zip(self.sizes, self.steps, strict=True)
            if not step.is_roundoff and math.isfinite(step.mismatch)
        ]
        if len(visible) < 2:
            return None
        larger_size, larger_mismatch = visible[-2]
        smaller_size, smaller_mismatch = visible[-1]
        rise = math.log(larger_mismatch / smaller_mismatch)
        return round(rise / math.log(larger_size / smaller_size), 3)


@dataclass(frozen=True)
class AuditRow:
    """One optimizer under one transformation.

    Attributes:
        optimizer, transformation: their names.
        measures: "batch", functions compared there: Definition 5, invariance on the model;
            "parameters", w₁ compared with f(θ₁): Definition 6, invariance on the parameter space;
            "probes", functions compared at other inputs, if any were given.
    """

    optimizer: str
    transformation: str
    measures: Mapping[str, Measure]

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the function values at the batch."""
        return self.measures["batch"].verdict


@dataclass(frozen=True)
class Skipped:
    """A transformation that does not go with the model or the optimizer, and why."""

    optimizer: str
    transformation: str
    reason: str


@dataclass(frozen=True)
class Audit:
    """Which transformations leave an optimizer's update unchanged.

    Attributes:
        rows: one per optimizer and transformation.
        skipped: standard transformations that do not apply, with the reason.
    """

    rows: tuple[AuditRow, ...]
    skipped: tuple[Skipped, ...] = ()

    def row(self, transformation: str, optimizer: str | None = None) -> AuditRow:
        """The row of a transformation, and of an optimizer where there are several."""
        for row in self.rows:
            if row.transformation == transformation and optimizer in (None, row.optimizer):
                return row
        what = f"There is no row {transformation!r}"
        if optimizer:
            what += f" of {optimizer!r}"
        raise PullbackError(
            what,
            f"audited were {list(self.transformations)} with {list(self.optimizers)}",
            "See `skipped` for transformations that do not go with the model",
        )

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(dict.fromkeys(r.optimizer for r in (*self.rows, *self.skipped)))

    @property
    def transformations(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(dict.fromkeys(r.transformation for r in (*self.rows, *self.skipped)))

    def verdicts(self, quantity: str = "batch") -> dict[tuple[str, str], Verdict]:
        """By optimizer and transformation: on the "batch", on "probes" or for "parameters"."""
        return {
            (r.optimizer, r.transformation): r.measures[quantity].verdict
            for r in self.rows
            if quantity in r.measures
        }

    def records(self) -> list[dict[str, Any]]:
        """Return one flat dict per row and quantity."""
        records = []
        for row in self.rows:
            for quantity, measure in row.measures.items():
                records.append(_make_record(row, quantity, measure))
        return records

    def __str__(self) -> str:
        if len(self.optimizers) > 1:
            lines = [format_matrix(self)]
            names = [f"{s.optimizer}, {s.transformation}" for s in self.skipped]
        else:
            lines = [format_details(self)]
            names = [s.transformation for s in self.skipped]
        for name, skipped in zip(names, self.skipped, strict=True):
            lines.append(f"left out: {name}: {skipped.reason}")
        return "\n".join(lines)


def _make_record(row: AuditRow, quantity: str, measure: Measure) -> dict[str, Any]:
    """Return the measure of one quantity as a flat dict."""
    finite = math.nan
    if measure.long_run:
        finite = measure.long_run[-1].mismatch
    record = {
        "optimizer": row.optimizer,
        "transformation": row.transformation,
        "place": quantity,
        "verdict": str(measure.verdict),
        "order": measure.order,
        "direction": measure.direction.mismatch,
        "round-off": measure.direction.roundoff,
        "finite": finite,
    }
    for size, step in zip(measure.sizes, measure.steps, strict=True):
        record[f"mismatch {size:g}"] = step.mismatch
        record[f"round-off {size:g}"] = step.roundoff
    return record


def format_details(audit: Audit) -> str:
    """Return the table of one optimizer: verdicts and mismatches of each transformation."""
    steps = max((len(r.measures["batch"].long_run) for r in audit.rows), default=0)
    columns = ["transformation", "on the batch", "order", "η → 0", "one step", f"{steps} steps"]
    columns += ["on probes", "on parameters"]
    rows = []
    for row in audit.rows:
        batch = row.measures["batch"]
        rows.append(
            [
                row.transformation,
                str(row.verdict),
                "–" if batch.order is None else f"{batch.order:.1f}",
                f"{batch.direction.mismatch:.1e}",
                f"{batch.steps[0].mismatch:.1e}",
                _format_last_step(batch),
                _format_verdict(row, "probes"),
                _format_verdict(row, "parameters"),
            ]
        )
    return _format_table(f"Audit of {', '.join(audit.optimizers)}", columns, rows)


def _format_verdict(row: AuditRow, quantity: str) -> str:
    if quantity not in row.measures:
        return "–"
    return str(row.measures[quantity].verdict)


def _format_last_step(measure: Measure) -> str:
    """Return the mismatch after the last step, in parentheses if round-off has grown as large."""
    if not measure.long_run:
        return "–"
    last_step = measure.long_run[-1]
    if last_step.is_resolved:
        return f"{last_step.mismatch:.1e}"
    return f"({last_step.mismatch:.1e})"


def format_matrix(audit: Audit) -> str:
    """Return the table of several optimizers: verdicts on the batch, mismatches as η → 0 below."""
    audited = {(row.optimizer, row.transformation): row for row in audit.rows}
    lines: list[list[str]] = []
    for optimizer in audit.optimizers:
        verdicts = [optimizer]
        mismatches = [""]
        for transformation in audit.transformations:
            row = audited.get((optimizer, transformation))
            if row is None:
                verdicts.append("–")
                mismatches.append("")
            else:
                verdicts.append(str(row.verdict))
                mismatches.append(f"{row.measures['batch'].direction.mismatch:.1e}")
        lines += [verdicts, mismatches]
    columns = ["optimizer", *audit.transformations]
    return _format_table("Invariance of the update on the model", columns, lines)


def _format_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text, flush left."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = ["─" * width for width in widths]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, rule, *rows)
    ]
    return "\n".join([title, *lines])
