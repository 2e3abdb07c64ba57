"""The geometry of a parametrized model φ: Ξ → (Z, g), overparametrized or not."""

from ..solvers import PseudoInverse as MoorePenrose
from .charts.diffeomorphism import Diffeomorphism, Elementwise, EntryPermutation, cubic
from .charts.reparametrize import reparametrize
from .charts.transformations import (
    Affine,
    NeuronPermutation,
    NeuronRescaling,
    Parameters,
    Transformation,
    Whitening,
    standard,
)
from .charts.twin import sigmoid_twin, tanh_twin
from .invariance.audit import audit
from .invariance.table import Audit, Verdict
from .invariance.trial import Contender
from .local.inverses import RandomInverse, Rank, WeightedNorm
from .local.point import Decomposition, Point
from .local.proper import Properness, properness
from .volume.flatness import Flatness, flatness

__all__ = [
    # one point
    "Point",
    "Decomposition",
    # generalized inverses
    "MoorePenrose",
    "RandomInverse",
    "WeightedNorm",
    # rank and properness
    "Rank",
    "properness",
    "Properness",
    # other coordinates for the same function
    "reparametrize",
    "Diffeomorphism",
    "Elementwise",
    "cubic",
    "EntryPermutation",
    "Transformation",
    "standard",
    "Affine",
    "Whitening",
    "NeuronRescaling",
    "NeuronPermutation",
    "Parameters",
    "tanh_twin",
    "sigmoid_twin",
    # what an optimizer makes of them
    "audit",
    "Audit",
    "Verdict",
    "Contender",
    # room around a minimum
    "flatness",
    "Flatness",
]
