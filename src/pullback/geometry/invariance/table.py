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
class AuditThresholds:
    """Numbers that turn mismatches into verdicts.

    Attributes:
        slack: how far above the measured round-off a mismatch still counts as none. Round-off is
            measured from one perturbation, which may be lucky by a factor of ten or more.
        blind: a round-off, with its slack, above which agreement cannot be claimed.
        clear: a round-off, with its slack, at which larger steps need not be looked at.
    """

    slack: float = 100.0
    blind: float = 0.05
    clear: float = 1e-3


THRESHOLDS = AuditThresholds()


class Verdict(Enum):
    """Whether an update is invariant; tables show the value."""

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
    def is_round_off(self) -> bool:
        """Whether round-off explains the mismatch."""
        return self.mismatch <= THRESHOLDS.slack * self.roundoff

    @property
    def is_decisive(self) -> bool:
        """Whether round-off is small enough to claim agreement."""
        return THRESHOLDS.slack * self.roundoff <= THRESHOLDS.blind


@dataclass(frozen=True)
class Measure:
    """Mismatches of one quantity: functions on the batch or on probes, or the parameters.

    Attributes:
        sizes: η, as multiples of the optimizer's own lr, largest first.
        steps: m(η) after one step, for each size.
        direction: m(0).
        finite: the mismatch after 1, 2, … steps of full size.

    >>> steps = (UpdateMismatch(0.3, 1e-15), UpdateMismatch(0.03, 1e-15))
    >>> measure = Measure((1.0, 0.1), steps, UpdateMismatch(1e-14, 1e-15), ())
    >>> measure.verdict, measure.order
    (<Verdict.FIRST_ORDER: 'first order'>, 1.0)
    """

    sizes: tuple[float, ...]
    steps: tuple[UpdateMismatch, ...]
    direction: UpdateMismatch
    finite: tuple[UpdateMismatch, ...]

    @property
    def verdict(self) -> Verdict:
        """Exact, first order, not invariant; undecided where round-off hides it."""
        if not self.direction.is_round_off:
            return Verdict.NOT
        if not self.direction.is_decisive:
            return Verdict.UNDECIDED
        if all(mismatch.is_round_off for mismatch in (*self.steps, *self.finite)):
            return Verdict.EXACT
        return Verdict.FIRST_ORDER

    @property
    def order(self) -> float | None:
        """d log m / d log η at the two smallest sizes that show it; None where none do."""
        points: list[tuple[float, float]] = []
        for size, step in zip(self.sizes, self.steps, strict=True):
            if not step.is_round_off and math.isfinite(step.mismatch):
                points.append((size, step.mismatch))
        if len(points) < 2:
            return None
        (larger_size, larger), (smaller_size, smaller) = points[-2:]
        return round(math.log(larger / smaller) / math.log(larger_size / smaller_size), 3)


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
        """On the model: what the update does to the function at the batch."""
        return self.measures["batch"].verdict


@dataclass(frozen=True)
class Skipped:
    """A transformation that does not go with the model or the optimizer, and why."""

    optimizer: str
    transformation: str
    reason: str

    @classmethod
    def because(cls, error: PullbackError, optimizer: str, transformation: str) -> Skipped:
        """Return a transformation that is left out because of an error."""
        return cls(optimizer, transformation, f"{error.what}: {error.why}")


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
        name = repr(transformation)
        if optimizer:
            name += f" of {optimizer!r}"
        raise PullbackError(
            f"There is no row {name}",
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
        verdicts = {}
        for row in self.rows:
            if quantity in row.measures:
                key = (row.optimizer, row.transformation)
                verdicts[key] = row.measures[quantity].verdict
        return verdicts

    def records(self) -> list[dict[str, Any]]:
        """One flat dict per row and quantity."""
        records = []
        for row in self.rows:
            for quantity, measure in row.measures.items():
                names = {"optimizer": row.optimizer, "transformation": row.transformation}
                records.append({**names, "place": quantity, **_record_measure(measure)})
        return records

    def __str__(self) -> str:
        has_several = len(self.optimizers) > 1
        if has_several:
            lines = [format_matrix(self)]
        else:
            lines = [format_details(self)]
        for skipped in self.skipped:
            name = skipped.transformation
            if has_several:
                name = f"{skipped.optimizer}, {name}"
            lines.append(f"left out: {name}: {skipped.reason}")
        return "\n".join(lines)


def _record_measure(measure: Measure) -> dict[str, Any]:
    """Return the numbers of a measure as a flat dict."""
    record: dict[str, Any] = {
        "verdict": str(measure.verdict),
        "order": measure.order,
        "direction": measure.direction.mismatch,
        "round-off": measure.direction.roundoff,
        "finite": measure.finite[-1].mismatch if measure.finite else math.nan,
    }
    for size, step in zip(measure.sizes, measure.steps, strict=True):
        record[f"mismatch {size:g}"] = step.mismatch
        record[f"round-off {size:g}"] = step.roundoff
    return record


def format_details(audit: Audit) -> str:
    """One optimizer: where it is invariant, the mismatch at small steps and after finite ones."""
    steps = max((len(row.measures["batch"].finite) for row in audit.rows), default=0)
    columns = ["transformation", "on the batch", "order", "η → 0", "one step", f"{steps} steps"]
    columns += ["on probes", "on parameters"]
    lines = []
    for row in audit.rows:
        batch = row.measures["batch"]
        line = [
            row.transformation,
            str(row.verdict),
            "–" if batch.order is None else f"{batch.order:.1f}",
            f"{batch.direction.mismatch:.1e}",
            f"{batch.steps[0].mismatch:.1e}",
            _format_last(batch),
        ]
        for quantity in ("probes", "parameters"):
            if quantity in row.measures:
                line.append(str(row.measures[quantity].verdict))
            else:
                line.append("–")
        lines.append(line)
    return _format_table(f"Audit of {', '.join(audit.optimizers)}", columns, lines)


def _format_last(measure: Measure) -> str:
    """Return the mismatch after the last step, in parentheses where round-off is as large."""
    if not measure.finite:
        return "–"
    text = f"{measure.finite[-1].mismatch:.1e}"
    if measure.finite[-1].is_decisive:
        return text
    return f"({text})"


def format_matrix(audit: Audit) -> str:
    """Several optimizers: the verdict on the batch, and below it the mismatch as η → 0."""
    rows = {(row.optimizer, row.transformation): row for row in audit.rows}
    lines = []
    for optimizer in audit.optimizers:
        verdicts = [optimizer]
        mismatches = [""]
        for transformation in audit.transformations:
            row = rows.get((optimizer, transformation))
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
    lines = [title]
    for row in (columns, rule, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
