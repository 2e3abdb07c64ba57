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

#: how far above the measured round-off a mismatch still counts as none
SLACK = 100.0
#: a round-off, with its slack, above which agreement cannot be claimed
BLIND = 0.05


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


@dataclass(frozen=True)
class Measure:
    """Mismatch seen in one place: on the batch, on probes, or among the parameters.

    Attributes:
        sizes: η, as multiples of the optimizer's own lr, largest first.
        steps: m(η) after one step, for each size.
        direction: m(0).
        finite: the mismatch after 1, 2, … steps of full size.

    >>> steps = (UpdateMismatch(0.3, 1e-15), UpdateMismatch(0.03, 1e-15))
    >>> found = Measure((1.0, 0.1), steps, UpdateMismatch(1e-14, 1e-15), ())
    >>> found.verdict, found.order
    (<Verdict.FIRST_ORDER: 'first order'>, 1.0)
    """

    sizes: tuple[float, ...]
    steps: tuple[UpdateMismatch, ...]
    direction: UpdateMismatch
    finite: tuple[UpdateMismatch, ...]

    @property
    def verdict(self) -> Verdict:
        """Exact, first order, not invariant; undecided where round-off hides it."""
        if not self._none(self.direction):
            return Verdict.NOT
        if not self.decides(self.direction):
            return Verdict.UNDECIDED
        same = all(map(self._none, (*self.steps, *self.finite)))
        return Verdict.EXACT if same else Verdict.FIRST_ORDER

    @property
    def order(self) -> float | None:
        """d log m / d log η at the two smallest sizes that show it; None where none do."""
        clear = [
            (size, s.mismatch)
            for size, s in zip(self.sizes, self.steps, strict=True)
            if not self._none(s) and math.isfinite(s.mismatch)
        ]
        if len(clear) < 2:
            return None
        (one, high), (two, low) = clear[-2:]
        return round(math.log(high / low) / math.log(one / two), 3)

    def decides(self, seen: UpdateMismatch) -> bool:
        """Whether round-off is small enough to claim agreement."""
        return SLACK * seen.roundoff <= BLIND

    def _none(self, seen: UpdateMismatch) -> bool:
        return seen.mismatch <= SLACK * seen.roundoff


@dataclass(frozen=True)
class AuditRow:
    """One optimizer under one transformation.

    Attributes:
        optimizer, transformation: their names.
        places: "batch", functions compared there: Definition 5, invariance on the model;
            "parameters", w₁ compared with f(θ₁): Definition 6, invariance on the parameter space;
            "probes", functions compared at other inputs, if any were given.
    """

    optimizer: str
    transformation: str
    places: Mapping[str, Measure]

    @property
    def verdict(self) -> Verdict:
        """On the model: what the update does to the function at the batch."""
        return self.places["batch"].verdict


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
        for r in self.rows:
            if r.transformation == transformation and optimizer in (None, r.optimizer):
                return r
        raise PullbackError(
            f"There is no row {transformation!r}" + (f" of {optimizer!r}" if optimizer else ""),
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

    def verdicts(self, place: str = "batch") -> dict[tuple[str, str], Verdict]:
        """By optimizer and transformation: on the "batch", on "probes" or for "parameters"."""
        return {
            (r.optimizer, r.transformation): r.places[place].verdict
            for r in self.rows
            if place in r.places
        }

    def records(self) -> list[dict[str, Any]]:
        """One flat dict per row and place."""
        out = []
        for r in self.rows:
            for place, m in r.places.items():
                record = {
                    "optimizer": r.optimizer,
                    "transformation": r.transformation,
                    "place": place,
                    "verdict": str(m.verdict),
                    "order": m.order,
                    "direction": m.direction.mismatch,
                    "round-off": m.direction.roundoff,
                    "finite": m.finite[-1].mismatch if m.finite else math.nan,
                }
                for size, seen in zip(m.sizes, m.steps, strict=True):
                    record[f"mismatch {size:g}"] = seen.mismatch
                    record[f"round-off {size:g}"] = seen.roundoff
                out.append(record)
        return out

    def __str__(self) -> str:
        several = len(self.optimizers) > 1
        lines = [matrix(self) if several else details(self)]
        for s in self.skipped:
            name = f"{s.optimizer}, {s.transformation}" if several else s.transformation
            lines.append(f"left out: {name}: {s.reason}")
        return "\n".join(lines)


def details(audit: Audit) -> str:
    """One optimizer: where it is invariant, the mismatch at small steps and after finite ones."""
    steps = max((len(r.places["batch"].finite) for r in audit.rows), default=0)
    columns = ["transformation", "on the batch", "order", "η → 0", "one step", f"{steps} steps"]
    columns += ["on probes", "on parameters"]
    rows = []
    for r in audit.rows:
        batch = r.places["batch"]
        others = (
            str(r.places[n].verdict) if n in r.places else "–" for n in ("probes", "parameters")
        )
        order = "–" if batch.order is None else f"{batch.order:.1f}"
        seen = (batch.direction, batch.steps[0])
        sizes = (f"{s.mismatch:.1e}" for s in seen)
        rows.append([r.transformation, str(r.verdict), order, *sizes, _last(batch), *others])
    return _set(f"Audit of {', '.join(audit.optimizers)}", columns, rows)


def _last(m: Measure) -> str:
    """The mismatch after the last step, in parentheses where round-off has grown as large."""
    if not m.finite:
        return "–"
    text = f"{m.finite[-1].mismatch:.1e}"
    return text if m.decides(m.finite[-1]) else f"({text})"


def matrix(audit: Audit) -> str:
    """Several optimizers: the verdict on the batch, and below it the mismatch as η → 0."""
    known, rows = {(r.optimizer, r.transformation): r for r in audit.rows}, []
    for o in audit.optimizers:
        found = [known.get((o, t)) for t in audit.transformations]
        sizes = ("" if r is None else f"{r.places['batch'].direction.mismatch:.1e}" for r in found)
        rows += [[o, *("–" if r is None else str(r.verdict) for r in found)], ["", *sizes]]
    columns = ["optimizer", *audit.transformations]
    return _set("Invariance of the update on the model", columns, rows)


def _set(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, flush left."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    rule = ["─" * width for width in widths]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (columns, rule, *rows)
    ]
    return "\n".join([title, *lines])
