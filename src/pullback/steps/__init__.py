"""Stage five, *steps*: how far, and do we accept?"""

from .base import Constant, Local, Move, Need, Step
from .damping_control import LevenbergMarquardt, RatioDamping
from .line_search import Backtracking, GridLineSearch
from .quadratic_model import QuadraticModel
from .retraction import Bounds, PositiveDefinite, Sphere, retraction
from .target_ratio import TargetRatio
from .wrappers import Clip, Spring, TrustNorm, Wrapper

__all__ = [
    "Backtracking",
    "Bounds",
    "Clip",
    "Constant",
    "GridLineSearch",
    "LevenbergMarquardt",
    "Local",
    "Move",
    "Need",
    "PositiveDefinite",
    "QuadraticModel",
    "RatioDamping",
    "Sphere",
    "Spring",
    "Step",
    "TargetRatio",
    "TrustNorm",
    "Wrapper",
    "retraction",
]
