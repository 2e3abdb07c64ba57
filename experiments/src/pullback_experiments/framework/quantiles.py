"""Quantiles over seeds of runs that may end early or be lost."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence


def finite(value: float) -> float:
    """The value; a run that was lost counts as infinite."""
    return value if math.isfinite(value) else math.inf


def held(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """y at the last x ≤ at: a run that ended keeps its last value.

    >>> held([0, 2, 4], [9.0, 8.0, 7.0], 3), held([0, 2, 4], [9.0, 8.0, 7.0], 99)
    (8.0, 7.0)
    """
    return finite(y[max(bisect_right(x, at) - 1, 0)])


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
