"""Medians and quantiles over seeds."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from .runs import Record


@dataclass(frozen=True)
class Summary:
    """One method over all seeds; medians unless said otherwise.

    Attributes:
        runs, stuck: how many, and how many of them got stuck.
        loss, error: final.
        best, worst: the final errors' extremes.
        errors: all final errors, by seed.
        per_step, seconds: of a step, and of a run.
        largest: the largest entry of any direction seen, per run.
        rank: of the Gram, over runs and steps.
        share: of the energy that the greedy choice keeps, over runs and steps.
    """

    runs: int
    stuck: int
    loss: float
    error: float
    best: float
    worst: float
    errors: tuple[float, ...]
    per_step: float
    seconds: float
    largest: float
    rank: float
    share: float

    def below(self, error: float) -> int:
        """How many runs ended with at most this error."""
        return sum(e <= error for e in self.errors)


def summarize(records: Sequence[Record]) -> Summary:
    """The summary of a method's runs; a run that was lost counts as infinite."""
    errors = tuple(_finite(r.error[-1]) for r in records)
    return Summary(
        runs=len(records),
        stuck=sum(r.stuck is not None for r in records),
        loss=statistics.median(_finite(r.loss[-1]) for r in records),
        error=statistics.median(errors),
        best=min(errors),
        worst=max(errors),
        errors=errors,
        per_step=statistics.median(r.per_step for r in records),
        seconds=statistics.median(r.seconds[-1] for r in records),
        largest=_median([max(r.values("largest"), default=math.nan) for r in records]),
        rank=_median([v for r in records for v in r.values("rank")]),
        share=_median([v for r in records for v in r.values("share")]),
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _median(values: Sequence[float]) -> float:
    kept = [v for v in values if not math.isnan(v)]
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
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        if place == low or ordered[low] == ordered[high]:
            return ordered[low]
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.25), at(0.5), at(0.75)
