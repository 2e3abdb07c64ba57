"""Ready problems with their standard set-ups, exact solutions and hard constraints."""

from .elliptic import Helmholtz, Multiscale, Poisson, Ritz1D, RitzPoisson
from .evolution import Burgers, Heat, LogFokkerPlanck, Schroedinger, Wave
from .flow import Cavity, Kovasznay
from .periodic import AllenCahn, Convection, GrayScott, KdV, KuramotoSivashinsky
from .ready import Ready
from .setup import SETUPS, Setup, setup

__all__ = [
    "Ready",
    # steady
    "Poisson",
    "Multiscale",
    "Helmholtz",
    "RitzPoisson",
    "Ritz1D",
    "Kovasznay",
    "Cavity",
    # in time
    "Heat",
    "Wave",
    "Burgers",
    "Convection",
    "AllenCahn",
    "KdV",
    "KuramotoSivashinsky",
    "GrayScott",
    "Schroedinger",
    "LogFokkerPlanck",
    # with a network and options
    "Setup",
    "SETUPS",
    "setup",
]
