"""Solutions of benchmark problems that have no elementary closed form, to compare with.

Each is a function of points that knows its estimated error; what takes seconds to compute is kept
on disk, in the folder named by the environment variable PULLBACK_CACHE or the user's cache.
"""

from .base import Reference
from .cavity_flow import Cavity, cavity
from .cole_hopf import Burgers, burgers
from .periodic import (
    AllenCahn,
    GrayScott,
    KortewegDeVries,
    KuramotoSivashinsky,
    Periodic,
    allen_cahn,
    gray_scott,
    kdv,
    kuramoto_sivashinsky,
)

__all__ = [
    "Reference",
    "burgers",
    "allen_cahn",
    "kdv",
    "kuramoto_sivashinsky",
    "gray_scott",
    "cavity",
    "Burgers",
    "Periodic",
    "AllenCahn",
    "KortewegDeVries",
    "KuramotoSivashinsky",
    "GrayScott",
    "Cavity",
]
