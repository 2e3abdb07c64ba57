"""Symmetries of networks: group actions on parameters that leave the function as it is."""

from .actions import Action, Leg, Scaling
from .balanced import Balanced
from .by_hand import by_hand
from .find import find
from .folding import Folding
from .keeper import make_slice
from .layer_slice import EqualNorm
from .mixing import Mixing
from .quotient import slice_direction
from .ranks import Rank
from .shifts import BiasShift, CommonShift, MeanShift, Shift, StreamShift
from .slice_basis import polar_tangents
from .slice_sgd import SliceSGD
from .sliced import Sliced
from .slices import Retraction, Slice
from .symmetry import Symmetry
from .verify import Rejected

__all__ = [
    # finding
    "find",
    "by_hand",
    "Symmetry",
    "Rank",
    "Rejected",
    # group actions
    "Action",
    "Leg",
    "Scaling",
    "Mixing",
    "Folding",
    "Shift",
    "BiasShift",
    "MeanShift",
    "CommonShift",
    "StreamShift",
    # slices
    "Slice",
    "Balanced",
    "EqualNorm",
    "Retraction",
    "make_slice",
    "polar_tangents",
    # descending on them
    "SliceSGD",
    "Sliced",
    "slice_direction",
]
