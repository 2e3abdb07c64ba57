"""Descent in an RKHS, and where there is no gradient to descend by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError
from pullback.kernels import (
    NTK,
    Tangent,
    fisher_rao_gradient,
    gradient_norm,
    linearize,
    rkhs_descent,
)
from pullback.testing import assert_close
from tests.kernels.nets import build, draw, inputs


def laplace(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-torch.cdist(a, b))


def test_sequential_descent_is_the_papers_sum() -> None:
    """(54), with ∇L taken at the iterate of its time: f_T = −Σ η K(x_t, ·)(f_{t−1}(x_t) − y_t)."""
    x, y = draw(4, 2), draw(4, 1, seed=1)
    found = rkhs_descent(
        laplace, x, lambda f: 0.5 * (f - y).square().sum(), lr=0.3, steps=1, order="sequential"
    )
    points: list[Tensor] = []
    weights: list[Tensor] = []

    def f(at: Tensor) -> Tensor:
        values = [w * laplace(at, p[None]) for p, w in zip(points, weights, strict=True)]
        return sum(values, torch.zeros(len(at), 1).double())

    for x_t, y_t in zip(x, y, strict=True):
        weights.append(-0.3 * (f(x_t[None])[0, 0] - y_t[0]))
        points.append(x_t)
    new = draw(5, 2, seed=2)
    assert_close(found(new), f(new), 1e-13, "f_T")


def test_batch_descent_contracts_by_i_minus_eta_k() -> None:
    x, y = draw(5, 2), draw(5, 2, seed=1)
    k = laplace(x, x)
    found = rkhs_descent(laplace, x, lambda f: 0.5 * (f - y).square().sum(), (2,), lr=0.2, steps=7)
    shrink = torch.linalg.matrix_power(torch.eye(5).double() - 0.2 * k, 7)
    assert_close(found(x), y - shrink @ y, 1e-12, "f_T(x)")
    assert len(found.losses) == 8
    assert bool((found.losses.diff() < 0).all())


def test_in_the_tangent_space_it_is_training_the_linearized_model() -> None:
    model, x, y = build("mlp"), inputs("mlp", 4), draw(4, 2, seed=1)
    found = rkhs_descent(
        NTK(Tangent(model)), x, lambda f: 0.5 * (f - y).square().sum(), (2,), lr=0.02, steps=5
    )
    first = linearize(model)
    opt = torch.optim.SGD(first.parameters(), lr=0.02)
    start = first(x).detach()
    for _ in range(5):
        opt.zero_grad()
        (0.5 * (first(x) - start - y).square().sum()).backward()
        opt.step()
    new = inputs("mlp", 3, seed=5)
    assert_close(found(new), (first(new) - model(new)).detach(), 1e-11, "f_T at new points")


def test_descent_refuses() -> None:
    x, y = draw(4, 2), draw(4, 1)
    with pytest.raises(PullbackError, match="diverged"):
        rkhs_descent(laplace, x, lambda f: (f - y).pow(4).sum(), lr=1e6, steps=50)
    for bad in ({"lr": 0.0, "steps": 1}, {"lr": 1.0, "steps": -1}):
        with pytest.raises(PullbackError, match="not determined"):
            rkhs_descent(laplace, x, lambda f: f.sum(), **bad)
    with pytest.raises(PullbackError, match="not determined"):
        rkhs_descent(laplace, x, lambda f: f.sum(), lr=1.0, steps=1, order="random")


POINTS, RESIDUALS = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([1.0, -2.0, 0.5])


def test_the_l2_gradient_does_not_exist() -> None:
    """‖∇ℓ‖² = n·|e|²/length: the norm doubles whenever the resolution is four times as fine."""
    norms = torch.stack([gradient_norm(POINTS, RESIDUALS, n) for n in (200, 800, 3200, 12800)])
    assert_close(norms[1:] / norms[:-1], torch.full((3,), 2.0).double(), 1e-12, "√n")


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_the_sobolev_gradient_does(order: float) -> None:
    """It converges to eᵀKe with the kernel of the line, ½e^(−d) or ¼e^(−d)(1 + d)."""
    norms = [
        float(gradient_norm(POINTS, RESIDUALS, n, order=order, length=40.0))
        for n in (400, 1600, 6400, 25600)
    ]
    d = (POINTS[:, None] - POINTS).abs().double()
    k = 0.5 * torch.exp(-d) if order == 1 else 0.25 * torch.exp(-d) * (1 + d)
    e = RESIDUALS.double()
    limit = float((e @ k @ e).sqrt())
    errors = [abs(norm - limit) for norm in norms]
    assert errors[-1] < 2e-3 * limit
    assert errors[2] < errors[1] < errors[0]


@pytest.mark.parametrize(("order", "exists"), [(0.25, False), (0.4, False), (0.75, True)])
def test_half_the_dimension_is_the_border(order: float, exists: bool) -> None:
    norms = [float(gradient_norm(POINTS, RESIDUALS, n, order=order)) for n in (2000, 20000, 200000)]
    steps = norms[1] - norms[0], norms[2] - norms[1]
    assert (steps[1] < 0.6 * steps[0]) == exists


def test_the_fisher_rao_gradient() -> None:
    """g(∇ℓ, h) = dℓ(h) for every h with Σh = 0, with the metric Σ h₁h₂/p; and Σ∇ℓ = 0."""
    p = torch.softmax(draw(7), 0)
    index, e = torch.tensor([1, 4, 4]), draw(3, seed=1)
    gradient = fisher_rao_gradient(p, index, e)
    assert abs(float(gradient.sum())) < 1e-14
    h = draw(7, seed=2)
    h = h - h.mean()
    assert abs(float((gradient * h / p).sum() - (e * h[index]).sum())) < 1e-13
    with pytest.raises(PullbackError, match="no density"):
        fisher_rao_gradient(p - 1, index, e)


def test_the_fisher_rao_gradient_does_not_exist_either() -> None:
    norms = []
    for n in (100, 400, 1600):
        x = torch.linspace(0, 1, n + 1)[:-1].double()
        p = 1 + 0.5 * torch.sin(2 * torch.pi * x)
        g = fisher_rao_gradient(p, torch.tensor([n // 4]), torch.ones(1), spacing=1 / n)
        norms.append(float((g.square() / p).sum().div(n).sqrt()))
    assert norms[2] / norms[1] == pytest.approx(2, rel=1e-2)
    assert norms[1] / norms[0] == pytest.approx(2, rel=1e-2)


def test_resolution_refuses() -> None:
    with pytest.raises(PullbackError, match="no points"):
        gradient_norm(POINTS, RESIDUALS[:2], 10)
    with pytest.raises(PullbackError, match="no grid"):
        gradient_norm(POINTS, RESIDUALS, 1)


def test_losses_and_grids_that_are_not_usable() -> None:
    x = torch.randn(4, 2, dtype=torch.float64)
    kernel = lambda a, b: torch.exp(-torch.cdist(a, b))  # noqa: E731
    losses: list[Any] = [lambda f: f, lambda f: torch.tensor(1.0), lambda f: 1.0]
    for loss in losses:
        with pytest.raises(PullbackError, match="not a number with a gradient"):
            rkhs_descent(kernel, x, loss, lr=0.1, steps=2)
    with pytest.raises(PullbackError, match="not determined"):
        rkhs_descent(kernel, x, lambda f: f.sum(), lr=0.1, steps=2.5)  # type: ignore[arg-type]
    one = torch.ones(1)
    with pytest.raises(PullbackError, match="not finite"):
        gradient_norm(one, one * torch.nan, 10)
    with pytest.raises(PullbackError, match="no space"):
        gradient_norm(one, one, 10, order=torch.inf)
    p = torch.full((4,), 0.25)
    for density, index in ((4 * p, 0), (p, 7), (p, -1)):
        with pytest.raises(PullbackError, match="no density"):
            fisher_rao_gradient(density, torch.tensor([index]), one)


class Recurrent(nn.Module):
    """No forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(3, 4, batch_first=True).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def test_a_recurrent_network_is_linearized() -> None:
    model, x = Recurrent(), torch.randn(5, 6, 3).double()
    first = linearize(model)
    torch.testing.assert_close(first(x), model(x))
    moved = {n: p + 1e-6 * torch.randn_like(p) for n, p in model.named_parameters()}
    now = torch.func.functional_call(model, moved, x)
    torch.testing.assert_close(first(x, params=moved), now, rtol=0, atol=1e-10)
    first(x).square().sum().backward()
    model(x).square().sum().backward()
    own = dict(first.weights.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(own[name].grad, p.grad)
