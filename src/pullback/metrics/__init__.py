"""Stage two, *metrics*: how long is a move of the function?"""

from .._core.factor import Blocks, Diagonal, Factor, Scaled, Whitened
from .base import Bregman, Euclidean, Fisher, Metric, MetricFunction, Weighted, as_metric
from .fubini_study import FubiniStudy
from .rkhs import Matern, ReproducingKernel, median_distance
from .sobolev import Sobolev

__all__ = [
    "Blocks",
    "Bregman",
    "Diagonal",
    "Euclidean",
    "Factor",
    "Fisher",
    "FubiniStudy",
    "Matern",
    "Metric",
    "MetricFunction",
    "ReproducingKernel",
    "Scaled",
    "Sobolev",
    "Weighted",
    "Whitened",
    "as_metric",
    "median_distance",
]
