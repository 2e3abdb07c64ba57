"""Linear networks with natural gradients in closed form, and the solutions to compare with."""

from . import solutions
from .deep import DeepMatrix
from .diagonal import DiagonalNetwork, LinearModel
from .kronecker import kronecker_lstsq
from .logistic import logistic_natural_gradient
from .population import Population, PopulationFisher, population_fisher
from .split import split_obstacle

__all__ = [
    # models
    "LinearModel",
    "DiagonalNetwork",
    "DeepMatrix",
    # natural gradients as functions
    "logistic_natural_gradient",
    "kronecker_lstsq",
    "split_obstacle",
    # the Fisher information over N(0, 1) inputs
    "population_fisher",
    "PopulationFisher",
    "Population",
    # what training is compared with
    "solutions",
]
