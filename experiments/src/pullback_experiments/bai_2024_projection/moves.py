r"""Predicted and actual moves of a network's function, at points that are not trained on.

With c = f − y at the data, per sample, and steps of half the mean square:

    standard   Δf = −η Θ(·, x) c/N
    natural    Δf = −η P c          metric M = I on the data
    Sobolev    Δf = −η P K c        metric M = K⁻¹ on the data: P of ∇ℓ = Σ_i K(·, x_i) c_i
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pullback import NaturalGradient
from pullback.kernels import (
    Expansion,
    FunctionChange,
    Tangent,
    functional_gradient,
    project,
    surject,
)
from pullback.metrics import Euclidean, Matern, Metric, Sobolev
from pullback.solvers import PseudoInverse
from pullback.steps import Constant

SCALE = 0.7  # of the Sobolev space
SIZES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)  # largest |Δf| predicted
METHODS = ("standard", "natural", "Sobolev")


def target(x: Tensor) -> Tensor:
    """Return the values of the function that is learned."""
    return torch.sin(2 * x) + 0.3 * x


def network(width: int, device: torch.device) -> nn.Sequential:
    """1-width-1, tanh; the units' steps are spread over the data, so that all of them matter."""
    net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    hidden = net[0]
    out = net[2]
    assert isinstance(hidden, nn.Linear)
    assert isinstance(out, nn.Linear)
    with torch.no_grad():
        centers = torch.linspace(-1.6, 1.6, width) + 0.2 * torch.randn(width)
        hidden.weight.copy_(2 + 0.3 * torch.randn(width, 1))
        hidden.bias.copy_(-hidden.weight[:, 0] * centers)
        out.weight.copy_(torch.randn(1, width) * width**-0.5)
    return net.to(device)


@dataclass(frozen=True)
class NetworkData:
    """A network, its data, and points between them.

    Attributes:
        net: at its start.
        x: data, (N, 1).
        grid: points that are not trained on, (n, 1).
    """

    net: nn.Sequential
    x: Tensor
    grid: Tensor

    @classmethod
    def of(cls, width: int, count: int, device: torch.device) -> NetworkData:
        """Return data at equal distances on [−2, 2], and other points on [−2.6, 2.6]."""
        x, grid = (
            torch.linspace(-end, end, n, dtype=torch.float64, device=device)[:, None]
            for end, n in ((2.0, count), (2.6, 201))
        )
        near = torch.cdist(grid, x).amin(1) < 1e-6
        return cls(network(width, device), x, grid[~near])

    @property
    def residuals(self) -> Tensor:
        """c = f − y, (N, 1)."""
        return (self.net(self.x) - target(self.x)).detach()

    @property
    def gradient(self) -> Expansion:
        """∇ℓ = Σ_i K(·, x_i) c_i in the Sobolev space."""
        expansion = functional_gradient(Matern(scale=SCALE), self.x, self.residuals)
        assert isinstance(expansion, Expansion)
        return expansion

    def change(self, method: str) -> FunctionChange:
        """The direction v and its dφ·v; a step is −η times this."""
        tangent = Tangent(self.net)
        c = self.residuals
        if method == "standard":
            return surject(tangent, self.x, gradient=c / len(c))
        projection = project(tangent, self.x, gradient=c, metric=metric_of(method))
        assert isinstance(projection, FunctionChange)
        return projection

    def take_step(self, method: str, lr: float) -> nn.Sequential:
        """Return a copy of the network after one step of the optimizer."""
        net = copy.deepcopy(self.net)
        optimizer = _optimizer(method, net, lr)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = 0.5 * (net(self.x) - target(self.x)).square().sum(1).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return net


def metric_of(method: str) -> Metric:
    """Return the metric of one of the two natural gradients."""
    if method == "natural":
        return Euclidean()
    return Sobolev(SCALE)


def _optimizer(method: str, net: nn.Module, lr: float) -> Optimizer:
    if method == "standard":
        return SGD(net.parameters(), lr=lr)
    return NaturalGradient(net, metric=metric_of(method), solver=PseudoInverse(), step=Constant(lr))


@torch.no_grad()
def compare_moves(scene: NetworkData, method: str) -> dict[str, Any]:
    """Return predicted and actual moves on the grid, and their distance for every step size."""
    change = scene.change(method)
    rate = change(scene.grid)
    before = scene.net(scene.grid)
    largest = float(rate.abs().max())
    errors = []
    shown = {}
    for size in SIZES:
        lr = size / largest
        with torch.enable_grad():
            moved = scene.take_step(method, lr)
        actual = moved(scene.grid) - before
        predicted = -lr * rate
        errors.append(float((actual - predicted).square().mean().sqrt()))
        shown = shown or {"predicted": predicted[:, 0], "actual": actual[:, 0]}
    at = change(scene.x)
    return {**shown, "size": list(SIZES), "error": errors, "rate": rate[:, 0], "at data": at[:, 0]}


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖/‖b‖."""
    return float((a - b).norm() / b.norm())


def projections(scene: NetworkData) -> dict[str, float]:
    """Return the relative errors of the laws of P and S."""
    tangent = Tangent(scene.net)
    c = scene.residuals
    x = scene.x
    metric = Sobolev(SCALE)
    forms: list[Callable[[Tensor], Tensor]] = [
        project(tangent, x, gradient=c, metric=metric, form=form)
        for form in ("pushforward", "orthonormal", "kernel")
    ]
    first, *others = (form(scene.grid) for form in forms)
    moved = forms[0](x)
    projected_twice = project(tangent, x, values=moved, metric=metric)(x)
    standard = surject(tangent, x, gradient=c)(x)
    twice = surject(tangent, x, values=standard)(x)
    kernel = metric.kernel(x, x.dtype)
    # ⟨∇ℓ − P∇ℓ, ∂_kφ⟩ = Jᵀ(c − K⁻¹P∇ℓ), beside ⟨∇ℓ, ∂_kφ⟩
    linear = tangent.at(x)
    left = linear.vjp(c - torch.linalg.solve(kernel, moved))
    return {
        "forms": max(relative(other, first) for other in others),
        "P twice": relative(projected_twice, moved),
        "S twice": relative(twice, standard),
        "orthogonal": float(left.norm() / linear.vjp(c).norm()),
        "kept": float((c * moved).sum() / (c * (kernel @ c)).sum()),
        "smoothed": relative(moved, kernel @ c),
    }
