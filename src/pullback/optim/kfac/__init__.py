"""K-FAC: statistics, averages and schedules around the algebra of `grams.kronecker`.

A step in one direction: capture → record → structure → cotangents → sums → averages → states of
rules → directions → update.
"""

from typing import TYPE_CHECKING

from ..._core.lazy import attach
from .factors.damping import Adaptive, Damping, Exact, Invariant, Tikhonov
from .optimizer import KFAC
from .report import Coverage, Degenerate, KFACInfo
from .rules import (
    AdamW,
    Eigenbasis,
    Estimation,
    Filters,
    Natural,
    Rule,
    Spectral,
    Statistics,
    TwoSided,
)

if TYPE_CHECKING:
    from .load_planner import KFACLoadPlanner
else:  # it imports torch.distributed.checkpoint, which takes long
    __getattr__, __dir__ = attach(__name__, {"load_planner": "KFACLoadPlanner"})

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
    "Filters",
    "Invariant",
    "KFACInfo",
    "KFACLoadPlanner",
    "Natural",
    "Rule",
    "Spectral",
    "Statistics",
    "Tikhonov",
    "TwoSided",
]
