"""Who notices the scale of a start, as yes or no."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..framework.check import Check, recorded
from ..framework.plain import Record
from ..framework.quantiles import finite, quantiles
from ..framework.tabular import Table
from .rescaled_methods import ADAM, KRONECKER, METHODS, MOMENTUM, SGD

#: records, one per seed, by start, method and size
Ends = Mapping[str, Mapping[str, Mapping[int, Sequence[Record]]]]
Verdict = tuple[str, bool, str]
SAME = 1e-6  # relative, between curves
SLOW = 3.0  # times the loss
_SLICED = tuple(m.name for m in METHODS if m.sliced)


def claims(found: Ends, held: Sequence[bool]) -> list[Check]:
    """None of these is in the paper, which does not rescale."""
    largest = max(max(sizes) for methods in found.values() for sizes in methods.values())
    checks = [
        _same(found, _SLICED),
        *(_slow(found, name, largest) for name in (SGD, MOMENTUM, ADAM, KRONECKER)),
    ]
    return recorded(checks, held, ours=range(len(checks)))


def final(records: Sequence[Record]) -> float:
    """The median over seeds of the last training loss, ∞ where it was lost."""
    return quantiles([finite(r["train loss"][-1]) for r in records])[1]


def apart(one: Record, two: Record) -> float:
    """The largest relative difference of two curves of the training loss."""
    a, b = one["train loss"], two["train loss"]
    if len(a) != len(b):
        return math.inf
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def _same(found: Ends, names: Sequence[str]) -> Verdict:
    worst = max(
        apart(run, plain)
        for methods in found.values()
        for name in names
        for size, runs in methods[name].items()
        if size
        for run, plain in zip(runs, methods[name][0], strict=True)
    )
    claim = f"{', '.join(names)} run as if nothing had been rescaled"
    return claim, worst <= SAME, f"losses at all epochs within {worst:.0e}, relative"


def _slow(found: Ends, name: str, size: int) -> Verdict:
    each = {start: (final(by[name][size]), final(by[name][0])) for start, by in found.items()}
    holds = all(a >= SLOW * b for a, b in each.values())
    numbers = "; ".join(f"{start}: {_loss(a)} for {_loss(b)}" for start, (a, b) in each.items())
    claim = f"after 10^±{size} {name} breaks or ends with {SLOW:g} times the loss and more"
    return claim, holds, numbers


def _loss(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "lost"


def table(start: str, found: Mapping[str, Mapping[int, Sequence[Record]]]) -> Table:
    """Final training losses by size, medians over seeds."""
    sizes = list(next(iter(found.values())))
    rows = [
        [name, f"{by[0][0]['rate']:g}", *(_loss(final(by[s])) for s in sizes)]
        for name, by in found.items()
    ]
    heads = ["as it was" if s == 0 else f"10^±{s}" for s in sizes]
    count = len(next(iter(found.values()))[0])
    return Table(["method", "lr", *heads], rows, f"{start}: median training loss of {count} seeds")
