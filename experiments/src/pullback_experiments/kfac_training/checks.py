"""Steps and seconds to the best loss of the first-order methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from ..framework.plain import Record
from ..framework.quantiles import finite
from ..framework.tabular import Table
from .methods import KRONECKER

#: records, one per seed, by method
Found = Mapping[str, Sequence[Record]]


def final(records: Sequence[Record]) -> float:
    """The median over seeds of the last training loss, ∞ where it was lost."""
    return median(finite(r["train loss"][-1]) for r in records)


def first_order(found: Found) -> list[str]:
    """The others: SGD, and Adam or AdamW."""
    return [name for name in found if name != KRONECKER]


def mark(found: Found) -> float:
    """The best loss that the first-order methods end with."""
    return min(final(found[name]) for name in first_order(found))


def to(records: Sequence[Record], level: float, along: str) -> float:
    """The median over seeds of steps or seconds until a loss is reached, ∞ where it never is."""

    def one(record: Record) -> float:
        pairs = zip(record["train loss"], record[along], strict=True)
        return next((float(at) for loss, at in pairs if loss <= level), math.inf)

    return median(one(r) for r in records)


def claims(found: Found, less: float = 1.0, fewer: float = 1.0) -> list[tuple[str, bool, str]]:
    """So many times fewer steps, and less time."""
    level, out = mark(found), []
    rivals = first_order(found)
    for along, share in (("step", fewer), ("seconds", less)):
        ours = to(found[KRONECKER], level, along)
        theirs = min(to(found[name], level, along) for name in rivals)
        what = "fewer steps" if along == "step" else "less time"
        what = what if share == 1 else f"{share:g} times {what}"
        numbers = f"{_said(ours)} and {_said(theirs)} {along.rstrip('s')}s to {level:.4g}"
        claim = f"K-FAC needs {what} to the best loss of {' and '.join(rivals)}"
        out.append((claim, ours < theirs and share * ours <= theirs, numbers))
    return out


def table(found: Found, told: Callable[[Mapping[str, float]], str]) -> Table:
    """Every method with its settings, ends and times."""
    level = mark(found)
    rows = [
        [
            name,
            told(runs[0]["settings"]),
            f"{final(runs):.4g}",
            f"{median(finite(r['test loss'][-1]) for r in runs):.4g}",
            _said(to(runs, level, "step")),
            _said(to(runs, level, "seconds")),
            f"{1e3 * median(r['seconds'][-1] / max(r['step'][-1], 1) for r in runs):.1f}",
        ]
        for name, runs in found.items()
    ]
    columns = ["method", "settings", "train loss", "test loss"]
    columns += [f"steps to {level:.4g}", "seconds to it", "ms/step"]
    count = len(next(iter(found.values())))
    return Table(columns, rows, f"Medians over {count} seeds", text=2)


def _said(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "never"
