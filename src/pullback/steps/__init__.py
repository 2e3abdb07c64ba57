"""Stage five, *steps*: how far, and do we accept?"""

from .base import Backtracking, Constant, GridLineSearch, Local, Move, Step
from .trust import LevenbergMarquardt, QuadraticModel, TargetRatio
from .wrappers import Bounds, Clip, PositiveDefinite, Sphere, Spring, TrustNorm, Wrapper, retraction

__all__ = [
    "Backtracking",
    "Bounds",
    "Clip",
    "Constant",
    "GridLineSearch",
    "LevenbergMarquardt",
    "Local",
    "Move",
    "PositiveDefinite",
    "QuadraticModel",
    "Sphere",
    "Spring",
    "Step",
    "TargetRatio",
    "TrustNorm",
    "Wrapper",
    "retraction",
]
