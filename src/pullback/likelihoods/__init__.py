"""Likelihoods: `Categorical`, `Bernoulli`, `Gaussian`, `MSE`, `Poisson`; `from_loss`."""

from .base import Likelihood
from .categorical import Categorical
from .elementwise import MSE, Bernoulli, Gaussian, Poisson
from .loss import from_loss, reduction_of

__all__ = [
    "MSE",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "Poisson",
    "from_loss",
    "reduction_of",
]
