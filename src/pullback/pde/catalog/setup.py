"""Problems with a network and options that solve them: one line each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..._core.errors import PullbackError, describe_nearest_names
from ...solvers import Cholesky
from ...steps import LevenbergMarquardt
from ..discretization.plan import Refine
from ..judgement.solution import PDESolution
from ..networks.choice import network_for
from ..networks.modules import Rescaled, Symmetric, mlp
from ..networks.separable import Separable
from ..problem.problem import Problem
from ..solve import solve
from .evolution import Burgers, Convection, Heat, LogFokkerPlanck, Schroedinger, Wave
from .ready import Ready
from .steady import Helmholtz, Kovasznay, Multiscale, Poisson, Ritz1D


@dataclass(frozen=True)
class Setup:
    """A problem, the network for a seed, and options of `solve`."""

    problem: Problem
    network: Callable[[int], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)

    def solve(self, seed: int = 0, **options: Any) -> PDESolution:
        """Solve with network and points of this seed; options given here count."""
        network = self.network(seed)
        return solve(self.problem, network, **{"seed": seed, **self.options, **options})


def fully_connected(
    problem: Ready,
    *sizes: int,
    parity: int = 0,
    activation: str = "tanh",
    dtype: torch.dtype = torch.float64,
    rescaled: bool = False,
    **options: Any,
) -> Setup:
    """Return a set-up of a fully connected network, with hard conditions built in.

    With a parity the solution is even (1) or odd (−1) in x, and so is the network. Rescaled, it
    sees coordinates from −1 to 1.
    """

    def network(seed: int) -> nn.Module:
        module: nn.Module = mlp(*sizes, seed=seed, activation=activation, dtype=dtype)
        if rescaled:
            module = Rescaled(module, problem.domain)
        module = problem.wrap(module)
        if parity:
            module = Symmetric(module, 0, parity)
        return module

    return Setup(problem, network, options)


def _points(equation: int, boundary: int, initial: int | None = None) -> dict[str, int]:
    """Return numbers of points by condition."""
    counts = {"equation": equation, "dirichlet": boundary}
    if initial is not None:
        counts["initial"] = initial
    return counts


def _waves(problem: Ready, parameters: int, **options: Any) -> Setup:
    """Return a set-up of `network_for`, which begins with the wave numbers of the data."""
    return Setup(
        problem, lambda seed: network_for(problem, parameters=parameters, seed=seed), options
    )


def separable(
    problem: Ready, *, rank: int = 0, width: int, pairs: int = 0, **options: Any
) -> Setup:
    """Return a set-up of a separable network of coordinates from −1 to 1."""

    def network(seed: int) -> nn.Module:
        dim = problem.domain.dim
        inner = Separable(dim, rank=rank, width=width, pairs=pairs, seed=seed)
        return Rescaled(inner, problem.domain)

    return Setup(problem, network, options)


#: set-ups by name; packages add theirs. Periodic problems take (sin ωx, cos ωx, t): three inputs
SETUPS: dict[str, Callable[[], Setup]] = {
    "poisson2d": lambda: fully_connected(Poisson(2), 2, 32, 1, points=_points(900, 120), steps=700),
    "multiscale": lambda: _waves(Multiscale(boundary_weight=1e4), 310, points=500, steps=150),
    "poisson5d": lambda: fully_connected(
        Poisson(5, boundary_weight=100), 5, 64, 1, points=_points(8000, 3000), steps=400
    ),
    "poisson10d": lambda: fully_connected(
        Poisson(10, boundary_weight=100), 10, 64, 1, points=_points(6000, 3000), steps=400
    ),
    # 99,961 parameters: a step solves for the 20,000 residuals instead
    "poisson100d": lambda: fully_connected(
        Poisson(100, boundary_weight=100), 100, 980, 1, activation="silu",
        points=_points(6000, 14_000), steps=40, gram="kernel", memory=2**33,
        solver=Cholesky(), step=LevenbergMarquardt(1e-2),  # long steps learn the points by heart
    ),
    "poisson10d-separable": lambda: separable(
        Poisson(10, boundary_weight=100), width=3, pairs=6, points=_points(1500, 1000), steps=100
    ),
    "poisson100d-separable": lambda: separable(
        Poisson(100, boundary_weight=100), rank=1, width=5, points=_points(4000, 2400), steps=40
    ),
    "heat10d": lambda: separable(
        Heat(10, boundary_weight=100), width=9, pairs=2,
        points=_points(2000, 1200, 600), steps=250,
    ),
    "fokker-planck10d": lambda: separable(
        LogFokkerPlanck(10), width=8, pairs=2, points=_points(2000, 1000, 500), steps=250
    ),
    "heat1d": lambda: fully_connected(
        Heat(1), 2, 20, 20, 1, points=_points(2000, 300, 300), sampler="grid", steps=400
    ),
    "heat4d": lambda: fully_connected(
        Heat(4, boundary_weight=100), 5, 64, 1, points=_points(6000, 2000, 1000), steps=400
    ),
    "burgers": lambda: fully_connected(
        Burgers(0.01 / math.pi, hard=True), 2, 24, 24, 24, 24, 1, parity=-1,
        points=12_000, sampler="sobol", refine=Refine(every=40, until=240), steps=600,
    ),
    "burgers-smooth": lambda: fully_connected(
        Burgers(0.01, hard=True), 2, 20, 20, 20, 20, 20, 1, parity=-1,
        points=8000, sampler="sobol", steps=600,
    ),
    # float32: few parameters and many points, so that the residuals' round-off averages out
    "burgers-single": lambda: fully_connected(
        Burgers(0.01, hard=True), 2, 16, 16, 16, 1, parity=-1, dtype=torch.float32,
        points=80_000, sampler="sobol", steps=400,
    ),
    "schroedinger": lambda: fully_connected(
        Schroedinger(hard=True), 2, 30, 30, 30, 2, parity=1, rescaled=True,
        points=8000, sampler="sobol", steps=350,
    ),
    "wave": lambda: fully_connected(
        Wave(hard=True), 2, 40, 40, 1, points=4900, sampler="grid", steps=600
    ),
    "wave-long": lambda: _waves(
        Wave(time=5.0, boundary_weight=1e3), 400,
        points=_points(1200, 200, 100), sampler="sobol", steps=100,
    ),
    "convection": lambda: fully_connected(
        Convection(hard=True), 3, 30, 30, 1, points=4900, sampler="grid", steps=600
    ),
    "helmholtz": lambda: fully_connected(
        Helmholtz(hard=True), 2, 30, 30, 1, points=3600, steps=400
    ),
    "kovasznay": lambda: fully_connected(
        Kovasznay(), 2, 30, 30, 3, steps=400,
        points={"equation": 2500, "dirichlet u": 400, "dirichlet v": 400},
    ),
    # with 3000 points the loss at fresh ones is three times as large
    "fokker-planck": lambda: fully_connected(
        LogFokkerPlanck(9, hard=True), 10, 64, 1, points=_points(16_000, 1000), steps=400
    ),
    "ritz": lambda: fully_connected(Ritz1D(), 1, 20, 1, points=400, sampler="gauss", steps=300),
}  # fmt: skip


_LABORATORY = (
    *("allen-cahn", "kdv", "kuramoto-sivashinsky", "gray-scott"),
    *("cavity", "cavity-400", "cavity-1000"),
)


def setup(name: str) -> Setup:
    """Return the set-up of this name.

    >>> setup("poisson2d").problem
    Poisson 2D(Box([(0.0, 1.0), (0.0, 1.0)], names=('x', 'y')), equation, dirichlet)
    """
    if name in SETUPS:
        return SETUPS[name]()
    if name in _LABORATORY:
        raise PullbackError(
            f"The set-up {name!r} comes with pullback-experiments",
            "the solution to compare with is computed there",
            "Install it; in Python, import pullback_experiments.problems first",
        )
    raise PullbackError(
        f"There is no set-up {name!r}",
        describe_nearest_names(name, SETUPS),
        "`pullback solve` without a name shows all",
    )
