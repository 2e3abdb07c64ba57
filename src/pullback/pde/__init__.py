"""PDEs: state a problem, pick a network, and solve it by the natural gradient in function space."""

from . import adapters
from .catalog.evolution import Burgers, Convection, Heat, LogFokkerPlanck, Schroedinger, Wave
from .catalog.ready import Ready
from .catalog.setup import SETUPS, Setup, setup
from .catalog.steady import Helmholtz, Kovasznay, Multiscale, Poisson, Ritz1D, RitzPoisson
from .discretization.plan import Refine
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
from .domains.sampling import Gauss, Grid, LatinHypercube, Points, Sampler, Sobol, Uniform
from .judgement.check import Check
from .judgement.estimate import Estimate
from .judgement.history import History
from .judgement.solution import PDESolution
from .judgement.validation import Residual
from .judgement.verdict import PDEVerdict
from .networks.choice import network_for
from .networks.modules import (
    FourierFeatures,
    Hard,
    PeriodicEmbedding,
    Rescaled,
    Sine,
    Symmetric,
    mlp,
)
from .networks.separable import Separable
from .problem.conditions import (
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
from .problem.problem import Problem
from .runs.run import Run
from .solve import solve

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
    "Separable",
    "Sine",
    # solved
    "solve",
    "Run",
    "PDESolution",
    "History",
    "PDEVerdict",
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
    # models of other packages
    "adapters",
]
