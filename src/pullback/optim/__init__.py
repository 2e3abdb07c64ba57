"""Stage six, *optim*: the `torch.optim.Optimizer` a user meets."""

from .info import StepInfo
from .kfac import KFAC
from .natural_gradient import NaturalGradient
from .presets import GaussNewton, HessianFree, LevenbergMarquardt
from .terms import EnergyTerm, Objective, Squares, Term

__all__ = [
    "EnergyTerm",
    "GaussNewton",
    "HessianFree",
    "KFAC",
    "LevenbergMarquardt",
    "NaturalGradient",
    "Objective",
    "Squares",
    "StepInfo",
    "Term",
]
