"""Solutions of benchmark problems that have no elementary closed form, to compare with.

Each is a function of points. What is computed numerically is solved at two resolutions, whose
difference is its `accuracy`, and kept on disk: in the folder named by the environment variable
PULLBACK_CACHE, or in the user's cache.
"""

from .base import Reference
from .cavity_flow import Cavity
from .periodic import AllenCahn, GrayScott, KortewegDeVries, KuramotoSivashinsky

__all__ = [
    "Reference",
    "AllenCahn",
    "KortewegDeVries",
    "KuramotoSivashinsky",
    "GrayScott",
    "Cavity",
]
