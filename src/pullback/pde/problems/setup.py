"""Problems with a network and options that solve them: one line each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..._core.errors import PullbackError
from ..networks import mlp
from ..plan import Refine
from ..solution import Solution
from ..solve import solve
from .elliptic import Helmholtz, Poisson
from .evolution import Burgers, Heat, LogFokkerPlanck, Wave
from .flow import Cavity, Kovasznay
from .periodic import AllenCahn, Convection, KdV
from .ready import Ready
from .ritz import Ritz1D


@dataclass(frozen=True)
class Setup:
    """A problem, the network for a seed, and options of `solve`."""

    problem: Ready
    network: Callable[[int], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)

    def solve(self, seed: int = 0, **options: Any) -> Solution:
        """Solve with network and points of this seed; options given here count."""
        network = self.network(seed)
        return solve(self.problem, network, **{"seed": seed, **self.options, **options})


def _made(problem: Ready, *sizes: int, **options: Any) -> Setup:
    """A fully connected network of these sizes with the problem's hard conditions built in."""
    return Setup(problem, lambda seed: problem.wrap(mlp(*sizes, seed=seed)), options)


def _points(equation: int, boundary: int, initial: int | None = None) -> dict[str, int]:
    """Numbers of points by condition."""
    more = {} if initial is None else {"initial": initial}
    return {"equation": equation, "dirichlet": boundary, **more}


# periodic problems take (sin ωx, cos ωx, t): three inputs
SETUPS: dict[str, Callable[[], Setup]] = {
    "poisson2d": lambda: _made(Poisson(2), 2, 32, 1, points=_points(900, 120), steps=400),
    "poisson5d": lambda: _made(Poisson(5), 5, 64, 1, points=_points(3000, 800), steps=400),
    "poisson10d": lambda: _made(Poisson(10), 10, 64, 1, points=_points(4000, 1000), steps=400),
    "poisson100d": lambda: _made(Poisson(100), 100, 128, 1, points=_points(1500, 500), steps=400),
    "heat1d": lambda: _made(Heat(1), 2, 64, 1, points=_points(900, 120, 60), steps=400),
    "heat4d": lambda: _made(Heat(4), 5, 64, 1, points=_points(3000, 800, 400), steps=400),
    "burgers": lambda: _made(
        Burgers(0.01 / math.pi, hard=True), 2, 30, 30, 30, 1,
        points=8000, sampler="sobol", refine=Refine(every=50), steps=1000,
    ),
    "burgers-smooth": lambda: _made(
        Burgers(0.01, hard=True), 2, 30, 30, 30, 1,
        points=8000, sampler="sobol", refine=Refine(every=50), steps=1000,
    ),
    "allen-cahn": lambda: _made(
        AllenCahn(hard=True), 3, 30, 30, 30, 1,
        points=8000, sampler="sobol", refine=Refine(every=50), steps=1000,
    ),
    "kdv": lambda: _made(
        KdV(hard=True), 3, 30, 30, 30, 1,
        points=8000, sampler="sobol", refine=Refine(every=50), steps=1000,
    ),
    "wave": lambda: _made(Wave(hard=True), 2, 40, 40, 1, points=4900, steps=600),
    "convection": lambda: _made(Convection(hard=True), 3, 30, 30, 1, points=4900, steps=600),
    "helmholtz": lambda: _made(Helmholtz(hard=True), 2, 30, 30, 1, points=3600, steps=400),
    "kovasznay": lambda: _made(
        Kovasznay(), 2, 30, 30, 3, steps=400,
        points={"equation": 2500, "dirichlet u": 400, "dirichlet v": 400},
    ),
    # the smooth lid: with the jumping one the pressure's error has no meaning
    "cavity": lambda: _made(
        Cavity(regularized=True, hard=True), 2, 30, 30, 3, points=3600, steps=600
    ),
    "fokker-planck": lambda: _made(
        LogFokkerPlanck(9, hard=True), 10, 64, 1, points=_points(3000, 1000), steps=400
    ),
    "ritz": lambda: _made(Ritz1D(), 1, 20, 1, points=400, sampler="gauss", steps=300),
}  # fmt: skip


def setup(name: str) -> Setup:
    """The set-up of this name.

    >>> setup("poisson2d").problem
    Poisson 2D(Box([(0.0, 1.0), (0.0, 1.0)], names=('x', 'y')), equation, dirichlet)
    """
    if name not in SETUPS:
        raise PullbackError(
            f"There is no set-up {name!r}", "it is not in the list", f"Use {', '.join(SETUPS)}"
        )
    return SETUPS[name]()
