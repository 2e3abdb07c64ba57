"""Stage six, *optim*: the `torch.optim.Optimizer` a user meets."""

from .info import StepInfo
from .natural_gradient import NaturalGradient
from .presets import GaussNewton, HessianFree, LevenbergMarquardt

__all__ = ["GaussNewton", "HessianFree", "LevenbergMarquardt", "NaturalGradient", "StepInfo"]
