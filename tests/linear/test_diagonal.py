"""Diagonal networks and the linear model against dense oracles, and the paper's theorems."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pullback import PullbackError
from pullback.linear import DiagonalNetwork, LinearModel, logistic_natural_gradient
from pullback.linear.population import natural_gradient_from_rows
from pullback.testing import relative_error
from tests.linear.oracles import flat, hadamard, jacobian, logistic_oracle
from tests.pairs import each_once

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(relative_error(a, b))


def dense_logistic(j: torch.Tensor, y: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """F⁺∇ with F = Jᵀφφ(−)J formed, at moderate logits."""
    root = (torch.sigmoid(s) * torch.sigmoid(-s)).sqrt()
    r = -y * torch.sigmoid(-y * s) / root
    return torch.linalg.pinv(root[:, None] * j, rtol=1e-12) @ r


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**20), st.integers(0, 3))
def test_natural_gradient_is_the_pseudo_inverse(
    dim: int, depth: int, seed: int, zeros: int
) -> None:
    model = DiagonalNetwork(dim, depth, seed=seed, dtype=DOUBLE)
    grad = draw(dim, seed=seed)
    for i in range(zeros):  # entries of zero, on several factors at one place too
        model.factors[i % depth].data[seed % dim] = 0.0
    j = jacobian(hadamard, list(model.factors))
    if not j.any():
        with pytest.raises(PullbackError, match="tangent is zero"):
            model.natural_gradient(grad)
        return
    assert error(flat(model.natural_gradient(grad)), torch.linalg.pinv(j) @ grad) < 1e-12
    eye = torch.eye(j.shape[1], dtype=DOUBLE)
    want = torch.linalg.solve(j.T @ j + 0.2 * eye, j.T @ grad)
    assert error(flat(model.natural_gradient(grad, damping=0.2)), want) < 1e-12


@pytest.mark.parametrize(("samples", "depth"), each_once([3, 6, 20], [1, 2, 4]))
def test_logistic_natural_gradient(samples: int, depth: int) -> None:
    dim = 6
    x = draw(samples, dim, seed=3)
    y = draw(samples, seed=4).sign()
    model = DiagonalNetwork(dim, depth, seed=2, dtype=DOUBLE)
    j = x @ jacobian(hadamard, list(model.factors))
    want = dense_logistic(j, y, model(x).detach())
    assert error(flat(model.logistic_natural_gradient(x, y)), want) < 1e-11
    # x_l = a_l b_l ∘ d/Σ(a_m b_m)² with d = F⁻¹∇, where F is invertible
    if samples >= dim:
        d = logistic_natural_gradient(x, y, model.beta.detach())
        assert error(flat(model.natural_gradient(d)), want) < 1e-11
    # (XJ)(XJ)ᵀ = X diag(Σ(ab)²)Xᵀ and pinv(XJ)(−y/φ(u)) below
    else:
        u = y * model(x).detach()
        assert error(want, torch.linalg.pinv(j) @ (-y * (1 + (-u).exp()))) < 1e-11


def test_a_coordinate_with_two_zeros_does_not_move() -> None:
    model = DiagonalNetwork(4, 3, seed=0, dtype=DOUBLE)
    for w in list(model.factors)[:2]:
        w.data[1] = 0.0
    for samples in (2, 9):
        x = draw(samples, 4)
        y = draw(samples, seed=1).sign()
        j = x @ jacobian(hadamard, list(model.factors))
        want = dense_logistic(j, y, model(x).detach())
        assert error(flat(model.logistic_natural_gradient(x, y)), want) < 1e-11


@pytest.mark.parametrize("samples", [4, 12])
@pytest.mark.parametrize("logits", ["large", "spread", "wrong", "both"])
def test_logits_of_any_size(samples: int, logits: str) -> None:
    """All large, spread over 800, grossly wrong: against 1500 digits."""
    dim = 5
    x = draw(samples, dim)
    y = draw(samples, seed=1).sign()
    s = {
        "large": 900 + draw(samples, seed=2),
        "spread": torch.linspace(0, 800, samples, dtype=DOUBLE),
        "wrong": torch.linspace(-300, -200, samples, dtype=DOUBLE),
        "both": torch.linspace(-600, 800, samples, dtype=DOUBLE),
    }[logits] * y
    want = logistic_oracle(x, y, s)
    size = want.abs().max()
    assert error(natural_gradient_from_rows(x, y, s) / size, want / size) < 1e-9


def test_rank_deficient_data() -> None:
    """More samples than rank, fewer dimensions than columns: F⁺ all the same."""
    x = draw(9, 3) @ draw(3, 6, seed=1)
    y = draw(9, seed=2).sign()
    beta = draw(6, seed=3)
    direction = logistic_natural_gradient(x, y, beta)
    assert error(direction, dense_logistic(x, y, x @ beta)) < 1e-11
    assert not logistic_natural_gradient(torch.zeros(3, 2), torch.ones(3), torch.zeros(2)).any()


def test_discrete_logits_follow_their_own_recursion() -> None:
    """N ≤ D: s ← s + ηy(1 + e^{−ys}), from s = 0 with η = ½: 1, then 1.6839397206."""
    x = draw(3, 7)
    y = torch.tensor([1.0, -1.0, 1.0], dtype=DOUBLE)
    beta = torch.zeros(7, dtype=DOUBLE)
    for want in (1.0, 1.6839397206):
        beta = beta - 0.5 * logistic_natural_gradient(x, y, beta)
        torch.testing.assert_close(x @ beta, want * y, rtol=1e-10, atol=0.0)
    for _ in range(400):
        beta = beta - 0.5 * logistic_natural_gradient(x, y, beta)
    # Theorem 3: logits along y, and the direction of β that of least squares
    solution = torch.linalg.pinv(x) @ y
    assert error(beta / beta.norm(), solution / solution.norm()) < 1e-2
    cosine = (beta @ solution) / (beta.norm() * solution.norm())
    assert float(cosine) > 1 - 1e-12  # equal initial logits stay equal


def test_theorem_1_fewer_samples_than_dimensions() -> None:
    """X → XAᵀ leaves the logits of every step where they were."""
    x = draw(4, 9)
    y = draw(4, seed=1).sign()
    a = draw(9, 9, seed=2)
    beta = draw(9, seed=3)
    moved = torch.linalg.solve(a.T, beta)
    for _ in range(20):
        beta = beta - 0.3 * logistic_natural_gradient(x, y, beta)
        moved = moved - 0.3 * logistic_natural_gradient(x @ a.T, y, moved)
        assert error(x @ a.T @ moved, x @ beta) < 1e-10


def test_theorem_2_at_least_as_many_samples() -> None:
    """Aᵀβ'_t = β_t, step by step."""
    x = draw(12, 5)
    y = draw(12, seed=1).sign()
    a = draw(5, 5, seed=2)
    beta = 0.1 * draw(5, seed=3)
    moved = torch.linalg.solve(a.T, beta)
    for _ in range(20):
        beta = beta - 0.3 * logistic_natural_gradient(x, y, beta)
        moved = moved - 0.3 * logistic_natural_gradient(x @ a.T, y, moved)
        assert error(a.T @ moved, beta) < 1e-10


def test_theorem_4_in_diagonal_networks() -> None:
    """ṡ = y/φ(ys) whatever the depth: the velocity of the logits under natural gradient flow."""
    x = draw(3, 6)
    y = torch.tensor([1.0, 1.0, -1.0], dtype=DOUBLE)
    for depth in (1, 2, 3, 5):
        model = DiagonalNetwork(6, depth, seed=depth, dtype=DOUBLE)
        s = model(x).detach()
        j = x @ jacobian(hadamard, list(model.factors))
        velocity = -j @ flat(model.logistic_natural_gradient(x, y))
        assert error(velocity, y * (1 + (-y * s).exp())) < 1e-11


def test_a_sum_with_a_mean_is_n_times_faster() -> None:
    """∇ of the summed loss and F averaged: N times the natural gradient of like with like."""
    x = draw(8, 3)
    y = draw(8, seed=1).sign()
    beta = draw(3, seed=2)
    s = x @ beta
    weights = torch.sigmoid(s) * torch.sigmoid(-s)
    mean = x.T @ (weights[:, None] * x) / 8
    mixed = torch.linalg.solve(mean, -x.T @ (y * torch.sigmoid(-y * s)))
    assert error(mixed, 8 * logistic_natural_gradient(x, y, beta)) < 1e-11


def test_forward_and_initialization() -> None:
    x = draw(5, 3)
    model = DiagonalNetwork(3, 2, seed=0, dtype=DOUBLE)
    assert model(x).shape == (5,)
    torch.testing.assert_close(model(x), x @ (model.factors[0] * model.factors[1]))
    torch.testing.assert_close(model(), model.beta)
    sizes = torch.stack(model.values()).abs()
    assert bool((sizes >= 0.5).all())
    assert bool((sizes <= 1.5).all())
    weights = draw(2, 3)
    torch.testing.assert_close(DiagonalNetwork(3, 2, weights).beta, weights.prod(0))
    assert DiagonalNetwork(3, 2, list(weights), dtype=torch.float32).beta.dtype is torch.float32
    assert not LinearModel(4).beta.any()
    assert LinearModel(2, torch.tensor([1.0, 2.0])).beta.tolist() == [1.0, 2.0]
    assert DiagonalNetwork(3, 2, 0.5).beta.tolist() == [0.25] * 3


@pytest.mark.parametrize("scale", [0.1, 3.0])
@pytest.mark.parametrize("gap", [1.0, 1e-7, 0.0])
def test_nearly_dependent_columns(gap: float, scale: float) -> None:
    """The rank is that of the SVD, however it was found, for like and for unlike weights."""
    x = draw(30, 4)
    y = draw(30, seed=1).sign()
    x[:, 3] = x[:, 2] + gap * x[:, 3]
    beta = scale * draw(4, seed=2).requires_grad_()
    u = y * (x @ beta).detach()
    root = (torch.sigmoid(u) * torch.sigmoid(-u)).sqrt()
    want = -torch.linalg.pinv(root[:, None] * x, rtol=1e-12) @ (root * y / torch.sigmoid(u))
    direction = logistic_natural_gradient(x, y, beta)
    assert not direction.requires_grad
    assert error(direction, want) < (1e-12 if gap != 1e-7 else 1e-6)


def test_types_are_promoted() -> None:
    x = draw(9, 4)
    y = draw(9, seed=1).sign()
    beta = draw(4, seed=2)
    want = logistic_natural_gradient(x.float().double(), y, beta)
    assert torch.equal(logistic_natural_gradient(x.float(), y, beta), want)


def test_float32() -> None:
    x = draw(4, 6).float()
    y = draw(4, seed=1).sign()
    model = DiagonalNetwork(6, 2, seed=0, dtype=torch.float32)
    direction = model.logistic_natural_gradient(x, y)
    assert all(m.dtype is torch.float32 for m in direction)
    twin = DiagonalNetwork(6, 2, model.values(DOUBLE))
    assert (
        error(flat(direction).double(), flat(twin.logistic_natural_gradient(x.double(), y))) < 1e-4
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DiagonalNetwork(0, 2), "not usable"),
        (lambda: DiagonalNetwork(2, 0), "not usable"),
        (lambda: DiagonalNetwork(2, 2, draw(2, 3)), "Factor 0 does not fit"),
        (lambda: DiagonalNetwork(2, 2, draw(3, 2)), "number of factors"),
        (lambda: DiagonalNetwork(2, 2)(draw(4, 3)), "input does not fit"),
        (lambda: DiagonalNetwork(2, 2).natural_gradient(draw(3)), "gradient does not fit"),
        (lambda: DiagonalNetwork(2, 2, 0.0).natural_gradient(draw(2)), "tangent is zero"),
        (lambda: DiagonalNetwork(2, 2).natural_gradient(draw(2), damping=-1.0), "damping"),
        (lambda: DiagonalNetwork(2, 2).natural_gradient(draw(2) * float("nan")), "not finite"),
        (
            lambda: DiagonalNetwork(2, 2, 0.0).logistic_natural_gradient(draw(3, 2), torch.ones(3)),
            "tangent is zero",
        ),
        (lambda: DiagonalNetwork(2, 2, dtype=torch.long), "dtype is not usable"),
        (lambda: DiagonalNetwork(2, 2).natural_gradient(draw(2) * 1j), "float type"),
        (lambda: DiagonalNetwork(2, 2).natural_gradient(3.0), "float type"),  # pyright: ignore
        (
            lambda: DiagonalNetwork(2, 2, 1e100, dtype=DOUBLE).population_natural_gradient(draw(2)),
            "not finite",
        ),
        (
            lambda: logistic_natural_gradient(
                draw(3, 2), torch.tensor([True, False, True]), draw(2)
            ),
            "not signs",
        ),
        (
            lambda: logistic_natural_gradient(
                draw(3, 2), torch.ones(3), draw(2), rcond=float("nan")
            ),
            "rcond",
        ),
        (lambda: logistic_natural_gradient(draw(3, 2), torch.ones(2), draw(2)), "labels y"),
        (lambda: logistic_natural_gradient(draw(3, 2), torch.ones(3), draw(3)), "β does not fit"),
        (lambda: logistic_natural_gradient(draw(3, 2), torch.zeros(3), draw(2)), "not signs"),
        (lambda: logistic_natural_gradient(draw(0, 2), torch.ones(0), draw(2)), "empty"),
        (lambda: logistic_natural_gradient(draw(3, 2), torch.ones(3), draw(2) / 0), "not finite"),
        (lambda: logistic_natural_gradient(draw(3, 2).long(), torch.ones(3), draw(2)), "float"),
        (lambda: logistic_natural_gradient(draw(3, 2) / 0, torch.ones(3), draw(2)), "not finite"),
        (
            lambda: logistic_natural_gradient(
                torch.eye(2, dtype=DOUBLE), torch.ones(2), torch.tensor([-800.0, 0.0], dtype=DOUBLE)
            ),
            "overflows",
        ),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(PullbackError, match=message):
        call()


@pytest.mark.parametrize(("scale", "dtype"), [(3e3, DOUBLE), (1e4, DOUBLE), (1e6, torch.float32)])
def test_logits_far_apart_are_decided_by_the_samples_behind(
    scale: float, dtype: torch.dtype
) -> None:
    """N > D, all correct: the D samples of least margin are met exactly, x̃ᵀΔ = 1/φ(u) = 1."""
    x = draw(6, 3).to(dtype)
    beta = scale * draw(3, seed=1).to(dtype)
    y = (x @ beta).sign()
    behind = (y * (x @ beta)).argsort()[:3]
    truth = -torch.linalg.solve((y[:, None] * x)[behind], torch.ones(3, dtype=dtype))
    direction = logistic_natural_gradient(x, y, beta)
    assert error(direction, truth) < 100 * torch.finfo(dtype).eps * float(truth.norm() + 1)


def test_weights_out_of_range_are_refused() -> None:
    """A sample that is wrong by 20 decides nothing beside others that are thousands ahead."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=DOUBLE)
    beta = torch.tensor([-20.0, 9e3], dtype=DOUBLE)
    with pytest.raises(PullbackError, match="out of range"):
        logistic_natural_gradient(x, torch.ones(3, dtype=DOUBLE), beta)


def test_half_precision_and_whole_numbers_of_numpy() -> None:
    x = draw(6, 3)
    y = draw(6, seed=1).sign()
    want = logistic_natural_gradient(x, y, torch.zeros(3, dtype=DOUBLE))
    direction = logistic_natural_gradient(x.half(), y.half(), torch.zeros(3).half())
    assert direction.dtype is torch.float16
    assert error(direction.double(), want) < 1e-2
    assert DiagonalNetwork(np.int64(3), np.int64(2)).dim == 3  # pyright: ignore
