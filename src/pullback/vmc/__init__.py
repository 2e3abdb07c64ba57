"""Neural quantum states: variational Monte Carlo with the natural gradient.

A network gives log ψ(s) of spin configurations. `minimize` finds the ground state of a Hamiltonian
by stochastic reconfiguration, the natural gradient of the Fubini–Study metric.
"""

from .amplitude import EvaluationOptions
from .energies import LocalEnergies, compute_local_energies
from .hamiltonians import (
    Connections,
    FunctionHamiltonian,
    Hamiltonian,
    Heisenberg,
    TransverseFieldIsing,
    enumerate_configurations,
)
from .history import History
from .lattice import Chain, Lattice, Square
from .minimize import cosine_decay, minimize
from .momentum import PrimeSpring, adaptive_step
from .networks import Convolutional, FactoredTransformer, Rbm
from .result import Result, correlate_spins
from .run import Minimization
from .sampler import MarkovChains, Metropolis
from .statistics import EnergyStatistics
from .symmetry import Symmetrized
from .verdict import ChainProblem, Outcome, StopReason, VMCVerdict

__all__ = [
    # where
    "Lattice",
    "Chain",
    "Square",
    # what is minimized
    "Hamiltonian",
    "TransverseFieldIsing",
    "Heisenberg",
    "FunctionHamiltonian",
    "Connections",
    "enumerate_configurations",
    # over which states
    "Rbm",
    "Convolutional",
    "FactoredTransformer",
    "Symmetrized",
    # how
    "minimize",
    "cosine_decay",
    "Metropolis",
    "PrimeSpring",
    "adaptive_step",
    "EvaluationOptions",
    "Minimization",
    "MarkovChains",
    "compute_local_energies",
    "LocalEnergies",
    # what comes of it
    "Result",
    "History",
    "EnergyStatistics",
    "VMCVerdict",
    "Outcome",
    "StopReason",
    "ChainProblem",
    "correlate_spins",
]
