"""What an audit found: rows, text tables, records."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._core.errors import PullbackError
from .verdict import Measure, Verdict

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One optimizer under one transformation.

    Attributes:
        optimizer, transformation: their names.
        batch: functions compared at the batch: Definition 5, invariance on the model.
        parameters: w₁ compared with f(θ₁): Definition 6, invariance on the parameter space.
        probes: functions compared at other inputs, if any were given.
    """

    optimizer: str
    transformation: str
    batch: Measure
    parameters: Measure
    probes: Measure | None = None

    @property
    def verdict(self) -> Verdict:
        """On the model: what the update does to the function at the batch."""
        return self.batch.verdict

    @property
    def places(self) -> dict[str, Measure]:
        """The measures by where they were taken."""
        found = {"batch": self.batch, "probes": self.probes, "parameters": self.parameters}
        return {name: m for name, m in found.items() if m is not None}


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

    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...] = ()

    def row(self, transformation: str, optimizer: str | None = None) -> Row:
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

    def frame(self) -> Any:
        """`records()` as a pandas DataFrame; the list itself where pandas is not installed."""
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError:
            return self.records()
        return pandas.DataFrame(self.records())

    def plot(self, path: str | Path) -> Path:
        """Write the figure: verdicts of several optimizers, or one optimizer's curves."""
        from .figure import figure

        return figure(self, path)

    def __rich__(self) -> Table:
        return matrix(self) if len(self.optimizers) > 1 else details(self)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=160, color_system=None, legacy_windows=False)
        console.print(self.__rich__())
        for s in self.skipped:
            name = f"{s.optimizer}, {s.transformation}" if len(self.optimizers) > 1 else None
            console.print(f"left out: {name or s.transformation}: {s.reason}", highlight=False)
        return console.file.getvalue().rstrip()  # pyright: ignore[reportAttributeAccessIssue]


def details(audit: Audit) -> Table:
    """One optimizer: where it is invariant, the mismatch at small steps and after finite ones."""
    steps = max((len(r.batch.finite) for r in audit.rows), default=0)
    table = _titled(f"Audit of {', '.join(audit.optimizers)}")
    table.add_column("transformation")
    titles = ["on the batch", "order", "η → 0", "one step", f"{steps} steps"]
    titles += ["on probes", "on parameters"]
    for title in titles:
        table.add_column(title, justify="left" if title.startswith("on ") else "right")
    for r in audit.rows:
        order = r.batch.order
        table.add_row(
            r.transformation,
            str(r.batch.verdict),
            "–" if order is None else f"{order:.1f}",
            shown(r.batch.direction.mismatch),
            shown(r.batch.steps[0].mismatch),
            _last(r.batch),
            "–" if r.probes is None else str(r.probes.verdict),
            str(r.parameters.verdict),
        )
    return table


def _last(m: Measure) -> str:
    """The mismatch after the last step, in parentheses where round-off has grown as large."""
    if not m.finite:
        return "–"
    text = shown(m.finite[-1].mismatch)
    return text if m.decides(m.finite[-1]) else f"({text})"


def matrix(audit: Audit) -> Table:
    """Several optimizers: the verdict on the batch and the mismatch as η → 0."""
    table = _titled("Invariance of the update on the model")
    table.add_column("optimizer")
    for name in audit.transformations:
        table.add_column(name)
    rows = {(r.optimizer, r.transformation): r for r in audit.rows}
    for optimizer in audit.optimizers:
        found: Sequence[Row | None] = [rows.get((optimizer, t)) for t in audit.transformations]
        cells = [
            "–" if r is None else f"{r.verdict}\n{shown(r.batch.direction.mismatch)}" for r in found
        ]
        table.add_row(optimizer, *cells)
    return table


def _titled(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left")


def shown(value: float) -> str:
    """A mismatch for people.

    >>> shown(0.00034), shown(math.inf)
    ('3.4e-4', 'inf')
    """
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"
