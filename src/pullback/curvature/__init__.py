"""Curvature of a finished model as an object: influence of samples, and uncertainty.

`fit` reads the data and returns a `Curvature`; `influence` asks which training samples made a
prediction, `laplace` how certain it is.
"""

from ..solvers import Relative
from .curvature import Curvature, CurvatureStructure, load
from .data_gram import ExactInfluence, exact_influence
from .fitter import fit
from .measures import margin
from .posterior import Posterior, Prediction, laplace
from .scores import (
    TopSamples,
    influence,
    influence_by_module,
    influence_by_token,
    self_influence,
    top_k,
)

__all__ = [
    # the object
    "fit",
    "load",
    "Curvature",
    "CurvatureStructure",
    "Relative",
    # influence
    "influence",
    "exact_influence",
    "ExactInfluence",
    "influence_by_module",
    "influence_by_token",
    "self_influence",
    "top_k",
    "TopSamples",
    "margin",
    # uncertainty
    "laplace",
    "Posterior",
    "Prediction",
]
