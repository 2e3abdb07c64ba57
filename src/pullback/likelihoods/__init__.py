"""Likelihoods: `Categorical`, `Bernoulli`, `Gaussian`, `MSE`, `Poisson`."""

from .base import Likelihood
from .categorical import Categorical
from .elementwise import MSE, Bernoulli, Gaussian, Poisson

__all__ = ["MSE", "Bernoulli", "Categorical", "Gaussian", "Likelihood", "Poisson"]
