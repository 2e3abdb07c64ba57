"""Learning rates along a run: share done ∈ [0, 1] ↦ factor on the initial rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[float], float]


def constant(share: float) -> float:
    """The rate stays."""
    return 1.0


def linear(share: float) -> float:
    """It falls to zero along a line."""
    return 1.0 - share


def cosine(share: float) -> float:
    """It falls to zero along half a period of the cosine.

    >>> [round(cosine(t), 3) for t in (0, 0.5, 1)]
    [1.0, 0.5, 0.0]
    """
    return 0.5 * (1 + math.cos(math.pi * share))


def step_decay(at: Sequence[float], factor: float = 0.1) -> Schedule:
    """It is multiplied by the factor at each of these shares.

    >>> step_decay([0.5, 0.75])(0.6)
    0.1
    """
    return lambda share: factor ** sum(share >= milestone for milestone in at)


def add_warmup(schedule: Schedule, until: float) -> Schedule:
    """It rises along a line until this share, under another schedule."""
    if until <= 0:
        return schedule
    return lambda share: schedule(share) * min(1.0, share / until)
