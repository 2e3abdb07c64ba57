"""The problems of the demonstration: a new one is a `DemoProblem`, and a line of `PROBLEMS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback import KFAC, HessianFree, NaturalGradient, pde
from pullback.likelihoods import Categorical
from pullback.optim import Objective
from pullback.pde.discretization.plan import SamplingPlan
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial
from pullback.pde.judgement.yardstick import Yardstick
from pullback.solvers import PseudoInverse
from pullback.steps import TargetRatio

from ..learning import data
from ..learning.natural import natural_kfac
from .display import draw_errors as draw
from .problem import Competitor, DemoProblem, Stepper, SupervisedTask, adam, descend, lbfgs, sgd


def load() -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1], (1797, 64), and labels, in a fixed random order."""
    images = data.digits(1797).flat()
    return images.x.double(), images.y


class Digits(SupervisedTask):
    """Cross-entropy of a 64-32-10 tanh network on 1347 images; 450 others test it."""

    title = "Digits"
    setting = "64-32-10 tanh network, 1347 images"

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        x, y = load()
        train = 1347  # of 1797 images; the other 450 are for testing
        self.x = x[:train]
        self._test = x[train:]
        self.y = y[:train]
        self._truth = y[train:]
        self.contenders = (
            Competitor("SGD", sgd, {"lr": 0.3}, {"lr": (0.03, 0.1, 0.3, 1.0)}, batch=64),
            Competitor("Adam", adam, {"lr": 0.03}, {"lr": (0.003, 0.01, 0.03, 0.1)}, batch=64),
            # on all images: with batches of 256, for which its rate was chosen, it ends behind Adam
            Competitor("K-FAC", _kfac, {"lr": 0.3}, {"lr": (0.03, 0.1, 0.3, 1.0)}),
            Competitor("Natural gradient", _hessian_free),
        )

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        right = model(self._test).argmax(1) == self._truth
        return {
            "training loss": float(F.cross_entropy(model(self.x), self.y)),
            "test accuracy": float(right.double().mean()),
        }


def _hessian_free(model: nn.Module) -> NaturalGradient:
    """The exact Fisher metric by conjugate gradients, on all images; nothing is tuned."""
    return HessianFree(model, Categorical())


def _kfac(model: nn.Module, lr: float) -> KFAC:
    """Sampled Fisher, statistics every fifth step, inverses every tenth, steps held by a clip."""
    return natural_kfac(
        model, lr, likelihood=Categorical(), damping=1e-3, kl_clip=1e-3,
        statistics_every=5, invert_every=10,
    )  # fmt: skip


def target(x: Tensor) -> Tensor:
    """g = sin(πx) sin(πy) + sin(3πx/2) sin(3πy/2), of points (N, 2)."""
    return torch.sin(math.pi * x).prod(1, True) + torch.sin(1.5 * math.pi * x).prod(1, True)


class LeastSquares(SupervisedTask):
    """½ mean |u − g|² over 1000 points; the error is relative L² on 4000 others.

    After Yin (2024), section 2.1: a [2, 30, 1] tanh network u is fitted to g on Ω = [0, 1]².
    """

    title = "Least squares"
    setting = "2-30-1 tanh network, 1000 points"

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        generator = torch.Generator().manual_seed(0)
        points = torch.rand(5000, 2, generator=generator, dtype=torch.float64)
        self.x = points[:1000]
        self._test = points[1000:]
        self.y = target(self.x)
        self._truth = target(self._test)
        self.contenders = (
            Competitor("SGD", sgd, {"lr": 0.3}, {"lr": (0.03, 0.1, 0.3, 1.0)}),
            Competitor("Adam", adam, {"lr": 0.01}, {"lr": (0.003, 0.01, 0.03, 0.1)}),
            # torch's L-BFGS drops curvature pairs below 1e-10: a larger loss keeps it going
            Competitor("L-BFGS", lbfgs, scale=1e3),
            Competitor("Natural gradient", _natural_gradient, {"radii": 48}, {"radii": (24, 48)}),
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


class PoissonTask(DemoProblem):
    """½ mean |Δu + f|² inside plus ½ mean u² on the boundary, u* = sin πx sin πy."""

    title = "Poisson's equation"
    setting = "2-32-1 tanh network, 900 + 120 points"

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self._problem = pde.Poisson(dim=2)
        points = {"equation": 900, "dirichlet": 120}
        plan = SamplingPlan(self._problem, 0, points=points)
        self._sites = plan.draw(0)
        self._yardstick = Yardstick(self._problem, torch.zeros((), dtype=torch.float64))
        self.contenders = (
            # not the best point of one search, 0.1 (2.7e-2; 0.03 had 3.3e-2): 0.1 swings, and ended
            # two other runs at 7e-2 and 2e-1
            Competitor("Adam", adam, {"lr": 0.03}, {"lr": (0.01, 0.03, 0.1, 0.3)}),
            # torch's L-BFGS drops curvature pairs below 1e-10: a larger loss keeps it going
            Competitor("L-BFGS", lbfgs, scale=1e3),
            Competitor("Natural gradient", _gauss_newton),
        )

    def model(self) -> Trial:
        network = pde.mlp(2, 32, 1, seed=0)
        return Trial(network, {}, next(network.parameters()))

    def stepper(self, contender: Competitor, model: nn.Module, optimizer: Optimizer) -> Stepper:
        """Return a function that takes steps; first-order optimizers see the sum of the terms."""
        assert isinstance(model, Trial)
        conditions = self._problem.conditions
        terms = [build_term(self._problem, c, model, self._sites[c.name]) for c in conditions]
        if isinstance(optimizer, NaturalGradient):
            objective = Objective(terms)
            return lambda: optimizer.step(objective=objective).loss
        params: dict[str, Tensor] = dict(model.named_parameters())

        def loss() -> Tensor:
            return torch.stack([t.loss(t.map(params)) for t in terms]).sum()

        return lambda: descend(optimizer, loss, contender.scale)

    def measure(self, model: nn.Module) -> dict[str, float]:
        return {"relative L² error": self._yardstick.error(model)}

    def picture(self, models: Mapping[str, nn.Module], folder: Path) -> Path:
        """Draw the exact solution and the error of each network."""
        return draw(self._problem, models, folder / "poisson.png")


def _gauss_newton(model: nn.Module) -> NaturalGradient:
    """What `pde.solve` uses unless told otherwise; its target ratio was chosen on this problem."""
    return NaturalGradient(model, solver=PseudoInverse(double=True), step=TargetRatio())


PROBLEMS: dict[str, Callable[[], DemoProblem]] = {
    "least_squares": LeastSquares,
    "poisson": PoissonTask,
    "digits": Digits,
}
