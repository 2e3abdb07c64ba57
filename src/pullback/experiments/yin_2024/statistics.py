"""Medians and quantiles over seeds."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from .runs import Record


class Summary:
    """One method over all seeds; a run that was lost counts as infinite."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = tuple(records)

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self.records)

    @property
    def stuck(self) -> int:
        """How many of them got stuck."""
        return sum(r.stuck is not None for r in self.records)

    @property
    def errors(self) -> list[float]:
        """The final errors."""
        return [_finite(r.error[-1]) for r in self.records]

    @property
    def loss(self) -> float:
        """The median final loss."""
        return self.after(math.inf)

    @property
    def error(self) -> float:
        """The median final error."""
        return statistics.median(self.errors)

    @property
    def per_step(self) -> float:
        """The median time of a step, in seconds."""
        return statistics.median(r.seconds[-1] / r.steps[-1] for r in self.records)

    def after(self, step: float) -> float:
        """The median loss after so many steps."""
        return statistics.median(held(r.steps, r.loss, step) for r in self.records)

    def below(self, error: float) -> int:
        """How many runs ended with at most this error."""
        return sum(e <= error for e in self.errors)

    def first(self, name: str) -> float:
        """The median over runs of the first value seen of this name, NaN where there is none."""
        return _median(v[0] for r in self.records if (v := r.values(name)))

    def largest(self, name: str) -> float:
        """The median over runs of the largest value seen of this name."""
        return _median(max(v) for r in self.records if (v := r.values(name)))

    def median(self, name: str) -> float:
        """The median over runs and steps of the values seen of this name."""
        return _median(v for r in self.records for v in r.values(name))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _median(values: Iterable[float]) -> float:
    kept = list(values)
    return statistics.median(kept) if kept else math.nan


def held(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """y at the last x ≤ at: a run that ended keeps its last value.

    >>> held([0, 2, 4], [9.0, 8.0, 7.0], 3), held([0, 2, 4], [9.0, 8.0, 7.0], 99)
    (8.0, 7.0)
    """
    return _finite(y[max(bisect_right(x, at) - 1, 0)])


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third.

    >>> quantiles([4.0, 1.0, 2.0, 3.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return low if low == high else low + (place % 1) * (high - low)  # ∞ − ∞ is no number

    return at(0.25), at(0.5), at(0.75)
