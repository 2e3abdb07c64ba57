"""Linear networks with natural gradients in closed form."""

from .deep import DeepMatrix
from .diagonal import DiagonalNetwork, LinearModel
from .minimum_norm import split_obstacle
from .population import PopulationFisher, logistic_natural_gradient, population_fisher

__all__ = [
    # models
    "LinearModel",
    "DiagonalNetwork",
    "DeepMatrix",
    # natural gradients as functions
    "logistic_natural_gradient",
    "split_obstacle",
    # the Fisher information over N(0, 1) inputs
    "population_fisher",
    "PopulationFisher",
]
