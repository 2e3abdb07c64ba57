"""Rules: how gradients become directions, each a contract of three methods (see `base`)."""

from .adamw import AdamW
from .base import (
    REFRESHED,
    SYMMETRIC,
    BlockShape,
    Defaults,
    Estimation,
    FactorAverages,
    RefreshReport,
    Rule,
    RuleState,
    Statistics,
    StepContext,
)
from .eigenbasis import Eigenbasis
from .natural import Natural
from .spectral import Filters, Spectral
from .two_sided import TwoSided

__all__ = [
    "REFRESHED",
    "SYMMETRIC",
    "AdamW",
    "BlockShape",
    "Defaults",
    "Eigenbasis",
    "Estimation",
    "FactorAverages",
    "Filters",
    "Natural",
    "RefreshReport",
    "Rule",
    "RuleState",
    "Spectral",
    "Statistics",
    "StepContext",
    "TwoSided",
]
