"""Margins, least squares and completions, by their optimality conditions and by enumeration."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from pullback import PullbackError
from pullback.testing import relative_error
from pullback_experiments.kerekes_2022.solutions import (
    l1_max_margin,
    l2_max_margin,
    lp_max_margin,
    nuclear_norm_completion,
    ordinary_least_squares,
    ridgeless,
    separates,
)

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(relative_error(a, b))


def separable(samples: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = draw(samples, dim, seed=seed)
    return x, (x @ draw(dim, seed=seed + 1)).sign()


def test_the_counterexample_to_invariance_of_margins() -> None:
    """X = (2, −3), A = [[1, 2], [−1, 0]]: the printed points are those of ℓ1, these of ℓ2."""
    x = torch.tensor([[2.0, -3.0]], dtype=DOUBLE)
    y = torch.ones(1, dtype=DOUBLE)
    a = torch.tensor([[1.0, 2.0], [-1.0, 0.0]], dtype=DOUBLE)
    beta = l2_max_margin(x, y).beta
    moved = l2_max_margin(x @ a.T, y).beta
    torch.testing.assert_close(beta, torch.tensor([2.0, -3.0], dtype=DOUBLE) / 13)
    torch.testing.assert_close(moved, torch.tensor([-0.2, -0.1], dtype=DOUBLE))
    torch.testing.assert_close(a.T @ moved, torch.tensor([-0.1, -0.4], dtype=DOUBLE))
    assert error(a.T @ moved, beta) > 0.1
    printed = torch.tensor([0.0, -1 / 3], dtype=DOUBLE)
    torch.testing.assert_close(l1_max_margin(x, y).beta, printed)
    torch.testing.assert_close(
        l1_max_margin(x @ a.T, y).beta, torch.tensor([-0.25, 0.0], dtype=DOUBLE)
    )


@pytest.mark.parametrize(("samples", "dim"), [(5, 12), (20, 4), (8, 8), (1, 3), (60, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_l2_satisfies_its_optimality_conditions(samples: int, dim: int, seed: int) -> None:
    """Zβ ≥ 1, β = Zᵀα with α ≥ 0 on the support alone."""
    x, y = separable(samples, dim, seed)
    actual = l2_max_margin(x, y)
    z = y[:, None] * x
    assert float((z @ actual.beta).min()) >= 1 - 1e-9
    active = z[actual.support]
    alpha = torch.linalg.lstsq(active.T, actual.beta, driver="gelsd").solution
    assert error(active.T @ alpha, actual.beta) < 1e-8
    assert float(alpha.min()) > -1e-7 * float(alpha.max())
    assert actual.gap is not None
    assert actual.gap < 1e-9
    assert abs(actual.norm - float(actual.beta.norm())) < 1e-12 * actual.norm


@pytest.mark.parametrize("seed", range(3))
def test_l1_is_the_best_vertex(seed: int) -> None:
    """Three dimensions: every vertex of {Zβ ≥ 1} within the faces of the orthants."""
    x, y = separable(6, 3, seed)
    z = y[:, None] * x
    best = float("inf")
    eye = torch.eye(3, dtype=DOUBLE)
    planes = [(row, 1.0) for row in z] + [(row, 0.0) for row in eye]
    for chosen in combinations(planes, 3):
        m = torch.stack([c[0] for c in chosen])
        if float(torch.linalg.matrix_rank(m)) == 3:
            beta = torch.linalg.solve(m, torch.tensor([c[1] for c in chosen], dtype=DOUBLE))
            if float((z @ beta).min()) > 1 - 1e-9:
                best = min(best, float(beta.abs().sum()))
    actual = l1_max_margin(x, y)
    assert abs(actual.norm / best - 1) < 1e-9
    assert actual.gap is not None
    assert actual.gap < 1e-9


@pytest.mark.parametrize("p", [2 / 3, 0.5])
def test_quasi_norms_reach_the_best_vertex_of_the_plane(p: float) -> None:
    x, y = separable(8, 2, 3)
    z = y[:, None] * x
    planes = [(row, 1.0) for row in z] + [(row, 0.0) for row in torch.eye(2, dtype=DOUBLE)]
    best = float("inf")
    for one, two in combinations(planes, 2):
        m = torch.stack([one[0], two[0]])
        beta = torch.linalg.solve(m, torch.tensor([one[1], two[1]], dtype=DOUBLE))
        if float((z @ beta).min()) > 1 - 1e-9:
            size = beta.abs()
            size = size[size > 1e-12]
            best = min(best, float((size**p).sum() ** (1 / p)))
    actual = lp_max_margin(x, y, p)
    assert actual.status == "stationary point"
    assert abs(actual.norm / best - 1) < 1e-8


def test_depth_asks_for_sparsity() -> None:
    x = draw(25, 40)
    y = x[:, :3].sum(1).sign()
    counts = [int((lp_max_margin(x, y, p).beta.abs() > 1e-9).sum()) for p in (2, 1, 2 / 3)]
    assert counts[0] == 40
    assert counts[0] > counts[1] >= counts[2]


def test_least_squares() -> None:
    x = draw(9, 4)
    y = draw(9, seed=1)
    assert error(ordinary_least_squares(x, y), torch.linalg.solve(x.T @ x, x.T @ y)) < 1e-12
    assert error(ridgeless(x, y), ordinary_least_squares(x, y)) < 1e-12
    for matrix in (draw(3, 7), draw(6, 2) @ draw(2, 5, seed=1)):
        target = draw(len(matrix), seed=2)
        assert (
            error(ridgeless(matrix, target), torch.linalg.pinv(matrix, rtol=1e-12) @ target) < 1e-11
        )
    assert not ridgeless(torch.zeros(2, 3), torch.ones(2)).any()


def test_invariance_of_least_squares() -> None:
    """X → XAᵀ: the same fitted values for N < D, Aᵀβ' = β for N ≥ D."""
    a = draw(5, 5, seed=3)
    x = draw(3, 5)
    y = draw(3, seed=1)
    assert error(x @ a.T @ ridgeless(x @ a.T, y), x @ ridgeless(x, y)) < 1e-11
    x = draw(11, 5)
    y = draw(11, seed=1)
    assert error(a.T @ ordinary_least_squares(x @ a.T, y), ordinary_least_squares(x, y)) < 1e-11


def test_completion_recovers_a_low_rank_matrix() -> None:
    truth = draw(20, 2) @ draw(2, 18, seed=1)
    order = torch.randperm(360, generator=torch.Generator().manual_seed(0))[:290]
    rows = order // 18
    columns = order % 18
    actual = nuclear_norm_completion((20, 18), rows, columns, truth[rows, columns], tol=1e-8)
    assert error(actual.matrix, truth) < 1e-5
    assert actual.rank() == 2
    assert actual.gap <= 1e-8
    assert torch.equal(
        actual.matrix[rows, columns].round(decimals=12), truth[rows, columns].round(decimals=12)
    )


def test_completion_against_known_optima() -> None:
    """One entry: the rest is zero. [[1, ?], [1, 1]]: the minimum norm is 2, at rank one."""
    one = nuclear_norm_completion(
        (3, 3), torch.tensor([1]), torch.tensor([2]), torch.tensor([-4.0], dtype=DOUBLE)
    )
    assert abs(one.norm - 4) < 1e-5
    rows = torch.tensor([0, 1, 1])
    columns = torch.tensor([0, 0, 1])
    two = nuclear_norm_completion((2, 2), rows, columns, torch.ones(3, dtype=DOUBLE))
    assert abs(two.norm - 2) < 1e-5
    assert abs(float(two.matrix[0, 1]) - 1) < 1e-2
    zero = nuclear_norm_completion((2, 2), rows, columns, torch.zeros(3))
    assert zero.norm == 0


def test_float32_and_separability() -> None:
    x, y = separable(5, 8)
    assert separates(x, y)
    actual = l2_max_margin(x.float(), y.float())
    assert actual.beta.dtype is torch.float32
    assert error(actual.beta.double(), l2_max_margin(x, y).beta) < 1e-5


XOR = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]])
MIXED = torch.tensor([1.0, 1.0, -1.0, -1.0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: l2_max_margin(XOR, MIXED), "not separable"),
        (lambda: l1_max_margin(XOR, MIXED), "not separable"),
        (lambda: lp_max_margin(XOR, MIXED, 0.5), "not separable"),
        (lambda: l2_max_margin(torch.zeros(1, 2), torch.ones(1)), "not separable"),
        (lambda: l2_max_margin(XOR, torch.ones(3)), "labels y does not fit"),
        (lambda: l2_max_margin(XOR, torch.tensor([0.0, 1, 0, 1])), "not signs"),
        (lambda: l2_max_margin(XOR / 0, MIXED), "not finite"),
        (lambda: lp_max_margin(XOR, MIXED, 3), "norm is not usable"),
        (lambda: ordinary_least_squares(draw(3, 5), draw(3)), "not unique.*ridgeless"),
        (lambda: ordinary_least_squares(torch.ones(5, 2), torch.ones(5)), "rank 1"),
        (lambda: ridgeless(draw(3, 2), draw(2)), "labels y does not fit"),
        (lambda: ridgeless(draw(0, 2), draw(0)), "empty"),
        (lambda: ridgeless(torch.ones(2, 2, dtype=torch.long), torch.ones(2)), "float type"),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(PullbackError, match=message):
        call()


def test_bad_observations() -> None:
    zero = torch.tensor([0, 0])
    values = torch.tensor([1.0, 2.0])
    with pytest.raises(PullbackError, match="contradict"):
        nuclear_norm_completion((2, 2), zero, zero, values)
    with pytest.raises(PullbackError, match="outside"):
        nuclear_norm_completion((2, 2), zero, torch.tensor([0, 2]), values)
    with pytest.raises(PullbackError, match="rows does not fit"):
        nuclear_norm_completion((2, 2), zero[:1], zero, values)
    with pytest.raises(PullbackError, match="values is empty"):
        nuclear_norm_completion((2, 2), zero[:0], zero[:0], values[:0])
    with pytest.raises(PullbackError, match="float type"):
        nuclear_norm_completion((2, 2), zero, zero, zero)
    with pytest.raises(PullbackError, match="whole numbers"):
        nuclear_norm_completion((2, 2), values, values, values)
    truth = draw(8, 8)
    index = torch.arange(8)
    with pytest.raises(PullbackError, match="did not converge"):
        nuclear_norm_completion(
            (8, 8), index, index.flip(0), truth.diagonal(), tol=1e-15, max_iterations=10
        )
    assert not separates(XOR, MIXED)


def test_separability_does_not_depend_on_units() -> None:
    x = draw(8, 4)
    beta = draw(4, seed=1)
    y = (x @ beta).sign()
    scaled = x * torch.tensor([1e-7, 1.0, 1e7, 1e3], dtype=x.dtype)
    assert separates(scaled, y)
    assert separates(scaled.requires_grad_(), y)
    actual = l2_max_margin(scaled, y)
    assert float((y * (scaled.detach() @ actual.beta)).min()) > 1 - 1e-9
    joined = torch.cat([scaled, scaled])
    signs = torch.cat([y, -y])
    assert not separates(joined, signs)
