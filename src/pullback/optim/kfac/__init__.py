"""K-FAC: statistics, averages and schedules around the algebra of `grams.kronecker`."""

from .blocks.coverage import Coverage
from .blocks.damping import Adaptive, Damping, Exact, Invariant, Tikhonov
from .blocks.degenerate import Degenerate
from .info import KFACInfo
from .optimizer import KFAC

__all__ = [
    "KFAC",
    "Adaptive",
    "Coverage",
    "Damping",
    "Degenerate",
    "Exact",
    "Invariant",
    "KFACInfo",
    "Tikhonov",
]
