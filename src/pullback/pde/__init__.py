"""PDEs: state a problem, pick a network, and solve it by the natural gradient in function space."""

from .check import Check, Estimate
from .conditions import (
    Condition,
    Data,
    Dirichlet,
    Energy,
    Equation,
    Initial,
    Integral,
    Neumann,
    Periodic,
    Prior,
    Robin,
)
from .domains import (
    Ball,
    Box,
    Difference,
    Disk,
    Domain,
    Intersection,
    Interval,
    PointSet,
    Polygon,
    Region,
    SpaceTime,
    Union,
)
from .history import History
from .networks import (
    FourierFeatures,
    Hard,
    PeriodicEmbedding,
    Rescaled,
    Sine,
    Symmetric,
    mlp,
    network_for,
)
from .plan import Refine
from .problem import Problem
from .problems.evolution import Burgers, Convection, Heat, LogFokkerPlanck, Schroedinger, Wave
from .problems.ready import Ready
from .problems.setup import SETUPS, Setup, setup
from .problems.steady import Helmholtz, Kovasznay, Multiscale, Poisson, Ritz1D, RitzPoisson
from .run import Run
from .sampling import Gauss, Grid, LatinHypercube, Points, Sampler, Sobol, Uniform
from .solution import Solution
from .solve import solve
from .validation import Residual
from .verdict import Verdict

__all__ = [
    # where
    "Region",
    "Domain",
    "Interval",
    "Box",
    "Ball",
    "Disk",
    "Polygon",
    "SpaceTime",
    "Union",
    "Intersection",
    "Difference",
    "PointSet",
    # what must hold
    "Problem",
    "Condition",
    "Equation",
    "Energy",
    "Dirichlet",
    "Neumann",
    "Robin",
    "Periodic",
    "Initial",
    "Data",
    "Integral",
    "Prior",
    # at which points
    "Points",
    "Sampler",
    "Grid",
    "Gauss",
    "Sobol",
    "LatinHypercube",
    "Uniform",
    "Refine",
    # with which network
    "mlp",
    "network_for",
    "Hard",
    "FourierFeatures",
    "PeriodicEmbedding",
    "Rescaled",
    "Symmetric",
    "Sine",
    # solved
    "solve",
    "Run",
    "Solution",
    "History",
    "Verdict",
    "Check",
    "Residual",
    "Estimate",
    # ready problems
    "Ready",
    "Poisson",
    "Multiscale",
    "Helmholtz",
    "RitzPoisson",
    "Ritz1D",
    "Kovasznay",
    "Heat",
    "Wave",
    "Burgers",
    "Convection",
    "Schroedinger",
    "LogFokkerPlanck",
    # ready problems with networks and options
    "Setup",
    "SETUPS",
    "setup",
]
