"""K-FAC: statistics, averages and schedules around the algebra of `grams.kronecker`.

A step in one direction: capture → record → structure → cotangents → sums → averages → states of
rules → directions → update.
"""

from .factors.damping import Adaptive, Damping, Exact, Invariant, Tikhonov
from .optimizer import KFAC
from .report import Coverage, Degenerate, KFACInfo
from .rules import AdamW, Eigenbasis, Estimation, Natural, Rule, Spectral, Statistics

__all__ = [
    "KFAC",
    "AdamW",
    "Adaptive",
    "Coverage",
    "Damping",
    "Degenerate",
    "Eigenbasis",
    "Estimation",
    "Exact",
    "Invariant",
    "KFACInfo",
    "Natural",
    "Rule",
    "Spectral",
    "Statistics",
    "Tikhonov",
]
