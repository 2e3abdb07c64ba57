"""Stage four, *solvers*: how is G⁺g found?"""

from .base import Damping, Path, Relative, Solution, Solver, resolve
from .cg import ConjugateGradient
from .cholesky import Cholesky
from .orthogonal_greedy import GreedySolution, OrthogonalGreedy
from .pinv import PseudoInverse, Spectrum
from .sketched import Sketched

__all__ = [
    "Cholesky",
    "ConjugateGradient",
    "Damping",
    "GreedySolution",
    "OrthogonalGreedy",
    "Path",
    "PseudoInverse",
    "Relative",
    "Sketched",
    "Solution",
    "Solver",
    "Spectrum",
    "resolve",
]
