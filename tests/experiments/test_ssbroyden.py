"""SSBroyden: the secant equation, positive definiteness, BFGS as a case, and two minimizations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from pullback import pde
from pullback_experiments.learning.ssbroyden import SSBroyden, update_inverse


def pair(seed: int, n: int = 7) -> tuple[torch.Tensor, ...]:
    """A positive definite H, a step s along −H g, and y with yᵀs > 0."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, n, generator=g, dtype=torch.float64) for _ in range(2))
    inverse = a @ a.T + 0.1 * torch.eye(n)
    hessian = b @ b.T + 0.1 * torch.eye(n)
    gradient = torch.randn(n, generator=g, dtype=torch.float64)
    s = -0.3 * inverse @ gradient
    return inverse, s, hessian @ s, gradient


@pytest.mark.parametrize("seed", range(20))
def test_updates(seed: int) -> None:
    inverse, s, y, gradient = pair(seed)
    actual = update_inverse(inverse, s, y, gradient, 0.3)
    assert torch.allclose(actual @ y, s, rtol=1e-8, atol=1e-9 * float(s.norm()))
    assert torch.allclose(actual, actual.T)
    assert float(torch.linalg.eigvalsh(actual)[0]) > 0
    plain = update_inverse(inverse, s, y, gradient, 0.3, scaled=False)
    rho = 1 / (y @ s)
    eye = torch.eye(len(s), dtype=torch.float64)
    left = eye - rho * torch.outer(s, y)
    assert torch.allclose(plain, left @ inverse @ left.T + rho * torch.outer(s, s))
    assert not torch.allclose(plain, actual)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_quadratic(scaled: bool) -> None:
    """Condition 1e4 in ten dimensions; the inverse Hessian comes out roughly."""
    turn = torch.linalg.qr(pair(0, 10)[0])[0]
    hessian = turn @ torch.diag(torch.logspace(-2, 2, 10, dtype=torch.float64)) @ turn.T
    x = nn.Parameter(torch.ones(10, dtype=torch.float64))
    optimizer = SSBroyden([x], scaled=scaled)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 0.5 * x @ hessian @ x
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(60)]
    assert losses[0] > 1
    assert closure().item() < 1e-16
    assert float((optimizer.inverse @ hessian - torch.eye(10)).norm()) < 0.5


def test_rosenbrock() -> None:
    x = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
    optimizer = SSBroyden([x])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
        loss.backward()
        return loss

    for _ in range(60):
        optimizer.step(closure)
    assert float((x.detach() - 1).abs().max()) < 1e-6


def test_residuals_of_a_network_beside_scipy() -> None:
    """The scaled update is at least as good as BFGS of scipy in as many iterations.

    An iteration takes little more than one evaluation, since that of the accepted point is kept.
    The loss is that of −u″ = π² sin πx with u = 0 at both ends.
    """
    network = pde.mlp(1, 10, 1, seed=0)
    x = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None].requires_grad_()
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)

    def loss() -> torch.Tensor:
        u = network(x)
        slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
        source = math.pi**2 * torch.sin(math.pi * x)
        return (second + source).square().mean() + 100 * network(ends).square().mean()

    start = nn.utils.parameters_to_vector(network.parameters()).detach()
    parameters = list(network.parameters())
    evaluations = 0

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        nn.utils.vector_to_parameters(torch.from_numpy(x), parameters)
        value = loss()
        gradients = torch.autograd.grad(value, parameters)
        return value.item(), nn.utils.parameters_to_vector(gradients).numpy()

    iterations = 150
    options = {"maxiter": iterations, "gtol": 0.0}
    rival = minimize(evaluate, start.numpy(), jac=True, method="BFGS", options=options)
    nn.utils.vector_to_parameters(start, parameters)
    optimizer = SSBroyden(parameters)

    def closure() -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(iterations):
        optimizer.step(closure)
    assert loss().item() < rival.fun
    assert evaluations < 1.5 * iterations
