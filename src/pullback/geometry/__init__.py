"""The geometry of a parametrized model φ: Ξ → (Z, g), overparametrized or not."""

from ..solvers import PseudoInverse as MoorePenrose
from .audit import audit
from .audit_optimizers import Contender, optimizers
from .audit_table import Audit
from .audit_verdict import Verdict
from .diffeomorphism import Diffeomorphism, Elementwise, cubic, sinh
from .flatness import Flatness, flatness
from .functions import (
    decompose,
    gram,
    natural_parameter_gradient,
    project,
    pushforward,
    rank,
    residual,
)
from .inverses import Damped, Generalized, RandomInverse, WeightedNorm
from .mixing import Coupling, EntryPermutation, Mixing
from .occurrence import Occurrence, occurrence
from .point import Decomposition, Point
from .proper import Properness, is_proper, properness
from .reparametrize import reparametrize
from .scan import SingularPoint, singular_points
from .spectrum import Rank
from .transformations import (
    Affine,
    NeuronPermutation,
    NeuronRescaling,
    Parameters,
    Transformation,
    Whitening,
    standard,
)
from .twin import sigmoid_twin, tanh_twin

__all__ = [
    # one point
    "Point",
    "pushforward",
    "gram",
    "natural_parameter_gradient",
    "project",
    "residual",
    "decompose",
    "Decomposition",
    # generalized inverses
    "MoorePenrose",
    "Generalized",
    "RandomInverse",
    "WeightedNorm",
    "Damped",
    # rank and properness
    "rank",
    "Rank",
    "is_proper",
    "properness",
    "Properness",
    "singular_points",
    "SingularPoint",
    "occurrence",
    "Occurrence",
    # other coordinates for the same function
    "reparametrize",
    "Diffeomorphism",
    "Elementwise",
    "sinh",
    "cubic",
    "Mixing",
    "EntryPermutation",
    "Coupling",
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
    "optimizers",
    # room around a minimum
    "flatness",
    "Flatness",
]
