"""Symmetries of networks: group actions on parameters that do not change the function."""

from .actions.action import Action
from .actions.charts import ChartAction
from .actions.mixing import Mixing
from .actions.scaling import Leg, Scaling
from .actions.shifts import Shift
from .find import Symmetry, find
from .orbits import SymmetryRank
from .slice_sgd import SliceSGD
from .sliced import Sliced
from .slices import Balanced, EqualNorm, Retraction, Slice, make_slice
from .verify import Rejected

__all__ = [
    # finding
    "find",
    "Symmetry",
    "SymmetryRank",
    "Rejected",
    # group actions
    "Action",
    "Leg",
    "Scaling",
    "Mixing",
    "Shift",
    "ChartAction",
    # slices
    "Slice",
    "Balanced",
    "EqualNorm",
    "Retraction",
    "make_slice",
    # descending on them
    "SliceSGD",
    "Sliced",
]
