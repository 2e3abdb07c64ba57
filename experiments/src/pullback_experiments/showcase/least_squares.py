r"""Least squares with a shallow network, after Yin (2024), section 2.1.

A [2, 30, 1] tanh network u is fitted to g on Ω = [0, 1]² by min ½‖u − g‖² in L²(Ω), with the
integral evaluated by Monte Carlo. The points are fixed; the error is measured on others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pullback import NaturalGradient
from pullback.solvers import PseudoInverse
from pullback.steps import TargetRatio

from . import baselines
from .contender import Contender
from .problem import Supervised

_POINTS, _TEST_POINTS = 1000, 4000


def target(x: Tensor) -> Tensor:
    """g = sin(πx) sin(πy) + sin(3πx/2) sin(3πy/2), of points (N, 2)."""
    return torch.sin(math.pi * x).prod(1, True) + torch.sin(1.5 * math.pi * x).prod(1, True)


class LeastSquares(Supervised):
    """½ mean |u − g|² over 1000 points; the error is relative L² on 4000 others."""

    title = "Least squares"
    setting = "2-30-1 tanh network, 1000 points"

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        generator = torch.Generator().manual_seed(0)
        points = torch.rand(_POINTS + _TEST_POINTS, 2, generator=generator, dtype=torch.float64)
        self.x, self._test = points[:_POINTS], points[_POINTS:]
        self.y, self._truth = target(self.x), target(self._test)
        self.contenders = (
            Contender("SGD", baselines.sgd, {"lr": 0.3}, {"lr": (0.03, 0.1, 0.3, 1.0)}),
            Contender("Adam", baselines.adam, {"lr": 0.01}, {"lr": (0.003, 0.01, 0.03, 0.1)}),
            # torch's L-BFGS drops curvature pairs below 1e-10: a larger loss keeps it going
            Contender("L-BFGS", baselines.lbfgs, scale=1e3),
            Contender("Natural gradient", _natural_gradient, {"radii": 48}, {"radii": (24, 48)}),
        )

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double()

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (z - y).square().mean()

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        error = (model(self._test) - self._truth).norm() / self._truth.norm()
        return {"relative L² error": float(error)}


def _natural_gradient(model: nn.Module, radii: float) -> NaturalGradient:
    """The Euclidean metric on outputs, with the largest of several trust radii that is good."""
    return NaturalGradient(model, solver=PseudoInverse(), step=TargetRatio(radii=int(radii)))
