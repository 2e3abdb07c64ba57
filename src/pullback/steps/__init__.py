"""Stage five, *steps*: how far, and do we accept?"""

from .base import Local, Move, Step
from .constant import Constant
from .levenberg_marquardt import LevenbergMarquardt
from .quadratic import QuadraticModel
from .retract import Box, PositiveDefinite, Sphere, retraction
from .search import Backtracking, GridLineSearch
from .target_ratio import TargetRatio
from .wrappers import Clip, Spring, TrustNorm, Wrapper

__all__ = [
    "Backtracking",
    "Box",
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
