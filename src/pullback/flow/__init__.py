"""Natural and Euclidean gradient flow of any map and metric."""

from .integrate import METHODS, integrate
from .supervised import Supervised
from .trajectory import Event, State, Trajectory

__all__ = [
    "integrate",
    "Trajectory",
    "Supervised",
    # what may happen on the way
    "Event",
    "State",
    "METHODS",
]
