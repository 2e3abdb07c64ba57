"""K-FAC: statistics, averages and schedules around the algebra of `grams.kronecker`.

A step in one direction: capture → record → structure → cotangents → sums → averages →
preconditioner → rule → update.
"""

from .factors.damping import Adaptive, Damping, Exact, Invariant, Tikhonov
from .optimizer import KFAC
from .report import Coverage, Degenerate, KFACInfo
from .rules import Eigenbasis, Natural, Rule, Spectral

__all__ = [
    "KFAC",
    "Adaptive",
    "Coverage",
    "Damping",
    "Degenerate",
    "Eigenbasis",
    "Exact",
    "Invariant",
    "KFACInfo",
    "Natural",
    "Rule",
    "Spectral",
    "Tikhonov",
]
