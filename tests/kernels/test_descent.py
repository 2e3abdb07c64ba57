"""Where there is no gradient among functions; recurrent networks linearized."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pullback.kernels import linearize
from pullback.testing import assert_close
from pullback_experiments.bai_2024_projection.experiment import gradient_norm
from tests.kernels.nets import draw

POINTS = torch.tensor([0.0, 1.0, 5.0])
RESIDUALS = torch.tensor([1.0, -2.0, 0.5])


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
    if order == 1:
        k = 0.5 * torch.exp(-d)
    else:
        k = 0.25 * torch.exp(-d) * (1 + d)
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
    """The gradient of Σ_i L(p(x_i)) in ∫ h₁h₂/p is p Σ_i e_i δ_i − p Σ_i p(x_i) e_i.

    g(∇ℓ, h) = dℓ(h) for every h with Σh = 0. In ∫ h₁h₂/p², as it is printed, that is not so.
    """
    p = torch.softmax(draw(7), 0)
    index = torch.tensor([1, 4, 4])
    e = draw(3, seed=1)
    delta = torch.zeros_like(p).index_add_(0, index, e)
    gradient = p * delta - p * (p[index] * e).sum()
    assert abs(float(gradient.sum())) < 1e-14
    h = draw(7, seed=2)
    h = h - h.mean()
    assert abs(float((gradient * h / p).sum() - (e * h[index]).sum())) < 1e-13
    assert abs(float((gradient * h / p.square()).sum() - (e * h[index]).sum())) > 0.1


class Recurrent(nn.Module):
    """No forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(3, 4, batch_first=True).double()
        self.head = nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


def test_a_recurrent_network_is_linearized() -> None:
    model = Recurrent()
    x = torch.randn(5, 6, 3).double()
    first = linearize(model)
    torch.testing.assert_close(first(x), model(x))
    moved = {n: p + 1e-6 * torch.randn_like(p) for n, p in model.named_parameters()}
    outputs = torch.func.functional_call(model, moved, x)
    torch.testing.assert_close(first(x, params=moved), outputs, rtol=0, atol=1e-10)
    first(x).square().sum().backward()
    model(x).square().sum().backward()
    weights = dict(first.weights.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[name].grad, p.grad)
