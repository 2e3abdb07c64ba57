"""How far to trust the quadratic model: damping that follows its ratio, and a clip in its norm."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import TypeVar

from torch import Tensor

from .._core.errors import PullbackError

Length = TypeVar("Length", float, Tensor)


@dataclass(frozen=True)
class RatioDamping:
    """λ after a step, from ρ = actual/predicted reduction of the loss.

    λ ← increase·λ where ρ < low or ρ is NaN, λ ← decrease·λ where ρ > high, both within
    [smallest, largest].

    >>> RatioDamping().next(1.0, ratio=0.1)
    2.0
    """

    low: float = 0.25
    high: float = 0.75
    increase: float = 2.0
    decrease: float = 1 / 3
    smallest: float = 1e-16
    largest: float = 1e8

    def __post_init__(self) -> None:
        good = all(isinstance(value, (int, float)) for value in vars(self).values())
        good = good and 0 <= self.low <= self.high < inf and 1 <= self.increase < inf
        if not (good and 0 < self.decrease <= 1 and 0 <= self.smallest <= self.largest < inf):
            raise PullbackError(
                "The control of the damping is not usable",
                f"got {self!r}",
                "Use 0 ≤ low ≤ high, increase ≥ 1, 0 < decrease ≤ 1, 0 ≤ smallest ≤ largest",
            )

    def next(self, damping: float, ratio: float, increase: float | None = None) -> float:
        """The next λ; `increase` replaces the factor by which it grows."""
        factor = 1.0
        if not ratio >= self.low:
            factor = self.increase if increase is None else increase
        elif ratio > self.high:
            factor = self.decrease
        return min(max(damping * factor, self.smallest), self.largest)


def clip_factor(squared_length: Length, limit: float) -> Length:
    """min(1, √(limit/squared_length)): what shortens a vector to length √limit at most.

    A tensor is answered by a tensor, without waiting for its device; NaN stays NaN.

    >>> clip_factor(16.0, limit=4.0), clip_factor(0.0, limit=4.0)
    (0.5, 1.0)
    """
    if isinstance(squared_length, Tensor):
        return (limit / squared_length.clamp(min=limit)).sqrt()
    return sqrt(limit / max(squared_length, limit))
