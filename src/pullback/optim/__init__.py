"""Stage six, *optim*: the `torch.optim.Optimizer` a user meets."""

from .kfac import KFAC
from .natural_gradient import NaturalGradient
from .objective import EnergyTerm, Objective, Squares, Term
from .outputs import Outputs
from .presets import DampedGaussNewton, GaussNewton, HessianFree
from .problem import StepInfo
from .roles import RoleRow, RoleTable, parameter_roles

__all__ = [
    "KFAC",
    "DampedGaussNewton",
    "EnergyTerm",
    "GaussNewton",
    "HessianFree",
    "NaturalGradient",
    "Objective",
    "Outputs",
    "RoleRow",
    "RoleTable",
    "Squares",
    "StepInfo",
    "Term",
    "parameter_roles",
]
