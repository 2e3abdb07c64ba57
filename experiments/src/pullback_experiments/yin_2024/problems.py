"""The paper's two problems, and one of them at Monte Carlo points with a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from pullback import pde
from pullback.optim import Objective
from pullback.pde.discretization.plan import SamplingPlan
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial
from pullback.pde.judgement.yardstick import Yardstick


def _waves(frequency: float, x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(frequency * math.pi * x) * torch.sin(frequency * math.pi * y)


def target(x: Tensor, y: Tensor) -> Tensor:
    """g = sin πx sin πy + sin(3πx/2) sin(3πy/2)."""
    return _waves(1.0, x, y) + _waves(1.5, x, y)


def least_squares() -> pde.Problem:
    """½‖u − g‖² in L²([0, 1]²): an equation without derivatives."""
    square = pde.Box([(0, 1), (0, 1)])
    fit = pde.Equation(lambda u, x, y: u - target(x, y))
    return pde.Problem(square, [fit], exact=target, name="Least squares")


def poisson() -> pde.Problem:
    """½‖Δu + f‖² + (100/2)‖u‖² on the boundary, with the solution u* = sin πx sin πy.

    Both norms are means over the points, so the boundary's is not multiplied by its length 4.
    """
    square = pde.Box([(0, 1), (0, 1)])
    laplace = pde.Equation(lambda u, x, y: u.laplacian + 2 * math.pi**2 * _waves(1.0, x, y))
    walls = pde.Dirichlet(0.0, weight=100.0)
    return pde.Problem(
        square, [laplace, walls], exact=lambda x, y: _waves(1.0, x, y), name="Poisson"
    )


@dataclass(frozen=True)
class FitSetting:
    """What is fitted, with which network, at how many points per condition."""

    problem: Callable[[], pde.Problem]
    layers: tuple[int, ...]
    points: Mapping[str, int]

    @property
    def size(self) -> int:
        """p, the number of parameters."""
        return sum((a + 1) * b for a, b in pairwise(self.layers))

    def start(self, seed: int) -> Fit:
        """Network and points of this seed."""
        return Fit(self.problem(), self.layers, self.points, seed)


class Fit:
    """A network at its initial parameters, and the loss at fixed uniform points.

    Attributes:
        model: the network, as the problem's trial function.
        objective: the loss as terms, for the natural gradient.
    """

    def __init__(
        self, problem: pde.Problem, layers: tuple[int, ...], points: Mapping[str, int], seed: int
    ) -> None:
        network = pde.mlp(*layers, seed=seed)
        parameter = next(network.parameters())
        self.model = Trial(network, problem.unknowns, parameter)
        plan = SamplingPlan(problem, self.size, points=points, sampler="uniform", seed=seed)
        sites = plan.draw(0)
        self.objective = Objective(
            [build_term(problem, c, self.model, sites[c.name]) for c in problem.conditions]
        )
        self._inside = sites[problem.conditions[0].name][0].x
        self._yardstick = Yardstick(problem, parameter)

    @property
    def size(self) -> int:
        """p, the number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def values(self, params: dict[str, Tensor]) -> Tensor:
        """u at the points of the equation, (N, 1): what the L² metric of u sees.

        They are the loss's own points. With others the gradient leaves the range of the Gram.
        """
        return self.model.apply_to(params, self._inside)

    def loss(self) -> Tensor:
        """The loss now."""
        params: dict[str, Tensor] = dict(self.model.named_parameters())
        return torch.stack([t.loss(t.map(params)) for t in self.objective.terms]).sum()

    def error(self) -> float:
        """The relative L² error against the known solution."""
        return self._yardstick.error(self.model)
