"""The Fisher matrix over N(0, 1) inputs against adaptive quadrature and sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit

from pullback import PullbackError
from pullback.linear import DiagonalNetwork, population_fisher
from pullback.linear.population import curvatures
from pullback.testing import relative_error
from tests.linear.oracles import flat, hadamard, jacobian

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(relative_error(a, b))


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.3, 1.0, 1.0001, 4.0, 60.0, 1e4])
def test_coefficients(size: float) -> None:
    a, c = curvatures(torch.tensor(size, dtype=DOUBLE))
    scale = max(size, 1.0)

    def bell(t: float) -> float:
        slope = size * t / scale
        return expit(slope) * expit(-slope) * np.exp(-0.5 * (t / scale) ** 2) / np.sqrt(2 * np.pi)

    def integral(f) -> float:
        return 2 * quad(f, 0, 50, limit=500, epsabs=0.0, epsrel=1e-13)[0] / scale

    want_a = integral(bell)
    want_c = integral(lambda t: (t / scale) ** 2 * bell(t))
    assert abs(float(a) / want_a - 1) < 1e-12
    assert abs(float(c) / want_c - 1) < 1e-12


def test_limits() -> None:
    """¼ at zero; 1/(ρ√2π) and π²/(3ρ³√2π) far out."""
    a, c = curvatures(torch.tensor(0.0, dtype=DOUBLE))
    assert abs(float(a) - 0.25) < 1e-14
    assert abs(float(c) - 0.25) < 1e-14
    a, c = curvatures(torch.tensor(1e6, dtype=DOUBLE))
    root = np.sqrt(2 * np.pi)
    assert abs(float(a) * 1e6 * root - 1) < 1e-10
    assert abs(float(c) * 1e18 * root * 3 / np.pi**2 - 1) < 1e-9


def test_against_samples() -> None:
    beta = torch.tensor([1.0, -2.0, 0.5], dtype=DOUBLE)
    x = draw(400_000, 3)
    s = x @ beta
    sampled = x.T @ ((torch.sigmoid(s) * torch.sigmoid(-s))[:, None] * x) / len(x)
    fisher = population_fisher(beta)
    assert float((fisher.dense() - sampled).abs().max()) < 2e-3
    v = draw(3, seed=1)
    assert error(fisher.solve(v), torch.linalg.solve(fisher.dense(), v)) < 1e-13
    assert error(fisher.matvec(v), fisher.dense() @ v) < 1e-14
    assert population_fisher(torch.zeros(2)).dense().tolist() == [[0.25, 0.0], [0.0, 0.25]]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("zero", [False, True])
def test_natural_gradient_of_diagonal_networks(depth: int, zero: bool) -> None:
    model = DiagonalNetwork(5, depth, seed=1, dtype=DOUBLE)
    grad = draw(5)
    if zero and depth > 1:
        for w in list(model.factors)[:2]:
            w.data[2] = 0.0
    j = jacobian(hadamard, list(model.factors))
    values, vectors = torch.linalg.eigh(population_fisher(model.beta.detach()).dense())
    rows = (vectors * values.sqrt()) @ vectors.T @ j
    inverse = torch.linalg.pinv(rows, rtol=1e-12)
    want = inverse @ (inverse.T @ (j.T @ grad))
    assert error(flat(model.population_natural_gradient(grad)), want) < 1e-10


def test_bad_input() -> None:
    with pytest.raises(PullbackError, match="β does not fit"):
        population_fisher(draw(2, 2))
    with pytest.raises(PullbackError, match="not finite"):
        population_fisher(draw(2) / 0)
    with pytest.raises(PullbackError, match="float type"):
        population_fisher(torch.tensor([1, 0]))
    for size in (1e-200, 1e80):  # whose squares are out of range
        far = population_fisher(size * torch.eye(2, dtype=torch.float64)[0])
        assert torch.isfinite(far.solve(draw(2))).all()
    with pytest.raises(PullbackError, match="tangent is zero"):
        DiagonalNetwork(2, 3, 0.0).population_natural_gradient(torch.ones(2))
