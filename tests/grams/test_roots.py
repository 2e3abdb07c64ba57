"""Polar factors, inverse roots and eigenbases by products, against decompositions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pullback.grams.kronecker import roots
from pullback.grams.kronecker.roots import (
    _LAST_POLYNOMIAL,
    _POLYNOMIALS,
    Route,
    inverse_root,
    polar,
    turn_bases,
    turn_basis,
)
from tests.pairs import all_pairs

DOUBLE = torch.float64
POLAR = 0.13  # how far from 1 singular values may come out


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def orthonormal(batch: int, n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(batch, n, n, seed=seed))[0]


def spread_eigenvalues(n: int, condition: float) -> Tensor:
    return torch.logspace(0, -float(torch.tensor(condition).log10()), n, dtype=DOUBLE)


def spd(n: int, condition: float, batch: int = 2) -> Tensor:
    """Symmetric matrices with eigenvalues from 1 to 1/condition."""
    basis = orthonormal(batch, n)
    out = (basis * spread_eigenvalues(n, condition)) @ basis.mT
    return (out + out.mT) / 2


# --- the polynomials ----------------------------------------------------------------------------


def quintic(coefficients: tuple[float, float, float], x: Tensor) -> Tensor:
    a, b, c = coefficients
    return a * x + b * x**3 + c * x**5


def test_the_polynomials_together_bring_small_numbers_near_one() -> None:
    x = torch.logspace(-3, 0, 100_001, dtype=DOUBLE)
    for coefficients in _POLYNOMIALS:
        x = quintic(coefficients, x)
    assert float(x.min()) >= 1 - POLAR
    assert float(x.max()) <= 1 + POLAR


def test_each_polynomial_is_the_best_on_the_interval_that_the_last_one_left() -> None:
    """By Chebyshev's theorem: 1 − p is ± its largest value, in turn, at four points."""
    low = 1e-3
    high = 1.0
    for a, b, c in _POLYNOMIALS:
        middle = -3 * b / (10 * c)
        half = ((3 * b) ** 2 - 20 * a * c) ** 0.5 / (10 * c)
        turns = [(middle - half) ** 0.5, (middle + half) ** 0.5]  # where p' = 0
        assert low < turns[0] < turns[1] < high
        errors = 1 - quintic((a, b, c), torch.tensor([low, *turns, high], dtype=DOUBLE))
        want = errors.abs().max() * torch.tensor([1.0, -1, 1, -1], dtype=DOUBLE)
        torch.testing.assert_close(errors, want, rtol=0, atol=1e-3)
        low = 1 - float(errors[2])
        high = 1.01 * (1 - float(errors[1]))


def test_the_last_polynomial_of_a_root_has_no_error_of_first_or_second_order() -> None:
    a, b, c = _LAST_POLYNOMIAL
    assert (a + b + c, a + 3 * b + 5 * c, 6 * b + 20 * c) == (1, 0, 0)
    x = torch.linspace(0.7, 1.3, 101, dtype=DOUBLE)
    assert float((quintic(_LAST_POLYNOMIAL, x) - 1).abs().max()) < 0.09


# --- routes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "fine", "route"),
    [
        ((15, 40), torch.float32, False, Route.EIGH),
        ((16, 16), torch.float32, False, Route.PRODUCTS),
        ((500, 192), torch.float32, False, Route.PRODUCTS),
        ((193, 193), torch.float32, False, Route.EIGH),
        ((64, 64), torch.float32, True, Route.EIGH),
        ((64, 64), torch.float64, False, Route.EIGH),
        ((64, 64), torch.bfloat16, False, Route.EIGH),
    ],
)
def test_a_cpu_takes_products_of_small_float32_matrices(
    shape: tuple[int, int], dtype: torch.dtype, fine: bool, route: Route
) -> None:
    assert roots._choose_route(torch.empty(1, *shape, dtype=dtype), fine=fine) is route


# --- polar factors ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 40), (24, 96), (96, 24), (50, 60)])
def test_products_in_half_precision_give_polar_factors(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, one polynomial after the other or several composed for long sides."""
    monkeypatch.setattr(roots, "_choose_route", lambda x: Route.HALF_PRODUCTS)
    u, _, vt = torch.linalg.svd(normal(2, *shape), full_matrices=False)
    values = torch.logspace(0, -4, u.shape[-1], dtype=DOUBLE)
    x = (u * values) @ vt
    out = polar(x.float())
    assert out.dtype == torch.float16
    coordinates = u.mT @ out.double() @ vt.mT
    is_large = values > 3e-3 * torch.linalg.vector_norm(values)
    large = coordinates.diagonal(dim1=1, dim2=2)[:, is_large]
    assert float((large - 1).abs().max()) < POLAR + 0.005
    assert float(torch.linalg.matrix_norm(out.double(), 2).max()) < 1 + POLAR + 0.02
    assert not polar(1e-30 * x.float()).any()


@pytest.mark.parametrize("shape", [(40, 40), (24, 96), (96, 24), (50, 60), (192, 300)])
@pytest.mark.parametrize("condition", [30.0, 1e4, 1e8])
def test_products_of_small_matrices_give_polar_factors(
    shape: tuple[int, int], condition: float
) -> None:
    """To the round-off of the Gram matrix, which has the squares of singular values."""
    u, _, vt = torch.linalg.svd(normal(2, *shape), full_matrices=False)
    values = spread_eigenvalues(u.shape[-1], condition)
    out = polar(((u * values) @ vt).float())
    assert out.dtype == torch.float32
    inner = u.mT @ out.double() @ vt.mT
    diagonal = inner.diagonal(dim1=1, dim2=2)
    is_large = values > 1e-3 * torch.linalg.vector_norm(values)
    assert float((diagonal[:, is_large] - 1).abs().max()) < POLAR
    torch.testing.assert_close(inner, torch.diag_embed(diagonal), rtol=0, atol=0.004)
    assert float(torch.linalg.matrix_norm(out.double(), 2).max()) < 1 + POLAR


def test_products_bear_zeros_low_rank_and_any_scale() -> None:
    x = (normal(4, 20, 3) @ normal(4, 3, 30, seed=1)).float()
    want = polar(x[3:])
    x[0] = 0
    x[1] *= 1e-9
    x[2] *= 1e9
    factors = polar(x)
    assert not factors[0].any()
    torch.testing.assert_close(factors[3:], want, rtol=0, atol=1e-4)
    values = torch.linalg.svdvals(factors[1:].double())
    assert float((values[:, :3] - 1).abs().max()) < POLAR
    assert float(values[:, 3:].max()) < 0.01


@pytest.mark.parametrize("shape", [(5, 5), (9, 4), (4, 9), (1, 7), (7, 1), (1, 1)])
@pytest.mark.parametrize("condition", [1.0, 30.0, 300.0])
def test_singular_values_become_one(shape: tuple[int, int], condition: float) -> None:
    """Of any scale, with the same singular vectors."""
    u, _, vt = torch.linalg.svd(normal(3, *shape), full_matrices=False)
    s = spread_eigenvalues(min(shape), condition)
    x = (u * s) @ vt * torch.tensor([1e-9, 1.0, 1e9], dtype=DOUBLE)[:, None, None]
    inner = u.mT @ polar(x) @ vt.mT
    values = inner.diagonal(dim1=1, dim2=2)
    assert float((values - 1).abs().max()) < POLAR
    torch.testing.assert_close(inner, torch.diag_embed(values), rtol=0, atol=1e-11)
    torch.testing.assert_close(polar(x), u @ inner @ vt, rtol=0, atol=1e-11)


def test_the_bound_holds_to_a_thousandth_of_the_norm() -> None:
    u, _, vt = torch.linalg.svd(normal(1, 6, 8), full_matrices=False)
    s = spread_eigenvalues(6, 1e3)
    s = s / s.norm()
    small = s < 1.01e-3
    values = (u.mT @ polar((u * s) @ vt) @ vt.mT).diagonal(dim1=1, dim2=2)[0]
    assert float((values[~small] - 1).abs().max()) < POLAR
    assert bool((values[small] < 1).all())
    assert bool((values > 0).all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("route", [Route.EIGH, Route.PRODUCTS])
def test_a_matrix_that_is_not_finite_does_not_disturb_others(value: float, route: Route) -> None:
    """No exception: a step on a GPU finds out later that it was void."""
    x = normal(2, 4, 6)
    if route is Route.PRODUCTS:
        x = normal(2, 20, 30).float()
    want = polar(x[1:])
    x[0, 2, 3] = value
    factors = polar(x)
    assert not torch.isfinite(factors[0]).all()
    torch.testing.assert_close(factors[1:], want, rtol=1e-4, atol=1e-5)


def test_zeros_stay_zeros_beside_others() -> None:
    x = normal(3, 4, 6)
    separate = polar(x[2:])
    x[1] = 0
    polar_factors = polar(x)
    assert not bool(polar_factors[1].any())
    torch.testing.assert_close(polar_factors[2:], separate, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_polar_factors_keep_the_dtype(dtype: torch.dtype) -> None:
    polar_factors = polar(normal(2, 5, 7).to(dtype))
    assert polar_factors.dtype == dtype
    values = torch.linalg.svdvals(polar_factors.double())
    assert float((values - 1).abs().max()) < POLAR + 0.05


# --- inverse roots ------------------------------------------------------------------------------


def by_eigh(side: Tensor, damping: float) -> Tensor:
    """(1 + C/c)^(-½) with c = λ tr(C)/n."""
    values, basis = torch.linalg.eigh(side)
    values = 1 + values / (damping * values.mean(-1, keepdim=True))
    return (basis * values.rsqrt()[:, None]) @ basis.mT


@pytest.mark.parametrize(
    ("n", "condition", "damping"), all_pairs([1, 2, 65], [1e1, 1e3, 1e6], [1e-3, 1e-1, 1.0])
)
def test_roots_are_those_of_eigh(n: int, condition: float, damping: float) -> None:
    """The last step leaves singular values of 1 ± 0.13 as 1 ± 0.006."""
    side = spd(n, condition)
    root, is_accurate = inverse_root(side, damping)
    want = by_eigh(side, damping)
    assert bool(is_accurate.all())
    error = torch.linalg.matrix_norm(root - want, 2) / torch.linalg.matrix_norm(want, 2)
    assert float(error.max()) < 0.006
    torch.testing.assert_close(root, root.mT, rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [16, 65, 192])
@pytest.mark.parametrize("condition", [1e1, 1e6])
def test_roots_by_products_are_those_of_eigh(n: int, condition: float) -> None:
    """In float32, beside a factor without statistics and one that is not finite."""
    side = spd(n, condition, batch=3)
    side[1] = 0
    side[2, 0, 1] = torch.nan
    root, is_accurate = inverse_root(side.float(), 0.2)
    assert is_accurate.tolist() == [True, True, False]
    want = by_eigh(side[:1], 0.2)
    error = torch.linalg.matrix_norm(root[:1] - want, 2) / torch.linalg.matrix_norm(want, 2)
    assert float(error) < 0.006
    torch.testing.assert_close(root[1].double(), torch.eye(n, dtype=DOUBLE), rtol=0, atol=0.006)
    torch.testing.assert_close(root[0], root[0].mT, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_a_side_does_not_matter(scale: float) -> None:
    side = spd(7, 100.0)
    torch.testing.assert_close(inverse_root(scale * side, 0.1)[0], inverse_root(side, 0.1)[0])
    diagonal = side.diagonal(dim1=1, dim2=2)
    pair = inverse_root(scale * diagonal, 0.1)[0], inverse_root(diagonal, 0.1)[0]
    torch.testing.assert_close(*pair)


def test_roots_of_diagonal_sides_are_exact() -> None:
    side = normal(3, 6).square()
    root, is_accurate = inverse_root(side, 0.1)
    want = by_eigh(torch.diag_embed(side), 0.1).diagonal(dim1=1, dim2=2)
    assert bool(is_accurate.all())
    torch.testing.assert_close(root, want, rtol=1e-12, atol=0)


def test_the_root_of_a_side_without_statistics_is_a_multiple_of_one() -> None:
    for side in (torch.zeros(2, 5, 5, dtype=DOUBLE), torch.zeros(2, 5, dtype=DOUBLE)):
        root, is_accurate = inverse_root(side, 0.1)
        assert bool(is_accurate.all())
        assert bool(torch.isfinite(root).all())
        if root.ndim == 3:
            whole = root
        else:
            whole = torch.diag_embed(root)
        one = torch.eye(5, dtype=DOUBLE).expand(2, 5, 5)
        torch.testing.assert_close(whole, one, rtol=0, atol=0.006)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("diagonal", [False, True])
def test_a_side_that_is_not_finite_is_flagged(value: float, diagonal: bool) -> None:
    side = spd(4, 10.0, batch=3)
    if diagonal:
        side = side.diagonal(dim1=1, dim2=2).clone()
    side[1] = value
    assert inverse_root(side, 0.1)[1].tolist() == [True, False, True]


# --- eigenbases ---------------------------------------------------------------------------------


def off_diagonal(side: Tensor, basis: Tensor) -> Tensor:
    """‖EᵀCE − diag‖ of each matrix, relative to ‖C‖."""
    inner = basis.mT @ side @ basis
    off_diagonal_part = inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))
    return torch.linalg.matrix_norm(off_diagonal_part) / torch.linalg.matrix_norm(side)


def not_orthonormal(basis: Tensor) -> float:
    one = torch.eye(basis.shape[-1], dtype=basis.dtype)
    return float((basis.mT @ basis - one).abs().max())


def nearby(n: int, far: float, batch: int = 2) -> Tensor:
    """A rotation by angles up to `far`."""
    k = normal(batch, n, n, seed=1)
    k = k - k.mT
    return torch.linalg.matrix_exp(far * k / torch.linalg.matrix_norm(k, 2, keepdim=True))


@pytest.mark.parametrize("far", [1e-3, 0.1, 0.4])
@pytest.mark.parametrize("n", [2, 9])
def test_a_turned_basis_comes_to_that_of_eigh(n: int, far: float) -> None:
    values = torch.linspace(1, 2, n, dtype=DOUBLE)
    basis = orthonormal(2, n)
    side = (basis * values) @ basis.mT
    estimate = basis @ nearby(n, far)
    last = off_diagonal(side, estimate)
    for _ in range(12):
        estimate = turn_basis(side, estimate).basis
        current = off_diagonal(side, estimate)
        assert bool(
            (current < last).all() if float(current.max()) > 1e-6 else (current < 1e-5).all()
        )
        last = current
    assert not_orthonormal(estimate) < 1e-9
    overlap = (basis.mT @ estimate).abs()
    torch.testing.assert_close(overlap, overlap.round(), rtol=0, atol=1e-6)
    torch.testing.assert_close(overlap.sum(-1), torch.ones(2, n, dtype=DOUBLE), rtol=0, atol=1e-6)


def test_a_turn_is_perturbation_theory_to_second_order() -> None:
    """C = S + ε S₁ in the eigenbasis of S: what is off the diagonal falls from ε to ε²."""
    basis = orthonormal(1, 6)
    values = torch.linspace(1, 2, 6, dtype=DOUBLE)
    remainders = []
    for size in (1e-3, 1e-4):
        change = normal(1, 6, 6, seed=3)
        side = (basis * values) @ basis.mT + size * (change + change.mT)
        remainders.append(float(off_diagonal(side, turn_basis(side, basis).basis)))
    assert remainders[0] < 100 * 1e-6
    assert remainders[1] == pytest.approx(remainders[0] / 100, rel=0.5)


@pytest.mark.parametrize("far", [0.0, 0.1])
def test_repeated_eigenvalues_have_any_basis(far: float) -> None:
    values = torch.tensor([1.0, 1, 1, 2, 2, 5, 0, 0], dtype=DOUBLE)
    basis = orthonormal(2, 8)
    side = (basis * values) @ basis.mT
    estimate = basis @ nearby(8, far)
    first = off_diagonal(side, estimate)
    for _ in range(10):
        estimate = turn_basis(side, estimate).basis
        assert not_orthonormal(estimate) < 1e-2
    assert not_orthonormal(estimate) < 1e-3
    assert bool((off_diagonal(side, estimate) <= 0.1 * first + 1e-12).all())


def test_a_basis_far_off_stays_orthonormal() -> None:
    """Rotations are bounded, and two steps of Newton and Schulz leave 2 % of error at most."""
    side = spd(30, 1e4, batch=3)
    estimate = orthonormal(3, 30, seed=5)
    for _ in range(20):
        estimate = turn_basis(side, estimate).basis
        assert not_orthonormal(estimate) < 0.02
    assert float(off_diagonal(side, estimate).max()) < 0.05


@pytest.mark.parametrize("side", [torch.zeros(2, 3, 3), torch.ones(2, 1, 1)])
def test_nothing_to_turn(side: Tensor) -> None:
    """No statistics, and one unit."""
    side = side.double()
    basis = orthonormal(len(side), side.shape[-1])
    torch.testing.assert_close(turn_basis(side, basis).basis, basis, rtol=0, atol=1e-12)


def test_bases_that_turn_together_turn_as_they_do_alone() -> None:
    sides = [spd(n, 30.0, batch=batch) for n, batch in ((6, 2), (4, 1), (6, 1), (1, 2))]
    bases = [orthonormal(*side.shape[:2], seed=4) for side in sides]
    turns = turn_bases([*sides, sides[0]], [*bases, None])
    assert turns[-1] is None
    for side, basis, turn in zip(sides, bases, turns, strict=False):
        single = turn_basis(side, basis)
        assert turn is not None
        torch.testing.assert_close(turn.basis, single.basis, rtol=0, atol=1e-12)
        torch.testing.assert_close(turn.rotation, single.rotation, rtol=0, atol=1e-12)


def test_a_factor_that_is_not_finite_spoils_no_other_turn() -> None:
    side = spd(5, 30.0)
    side[0, 1, 2] = torch.nan
    basis = orthonormal(2, 5, seed=4)
    new_basis = turn_basis(side, basis).basis
    assert not torch.isfinite(new_basis[0]).all()
    torch.testing.assert_close(new_basis[1:], turn_basis(side[1:], basis[1:]).basis)


def test_the_scale_of_a_side_does_not_matter_to_its_basis() -> None:
    side = spd(6, 30.0)
    basis = orthonormal(2, 6, seed=4)
    for scale in (1e-6, 1e6):
        pair = turn_basis(scale * side, basis).basis, turn_basis(side, basis).basis
        torch.testing.assert_close(*pair, rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [12, 60])
def test_bases_stay_orthonormal_in_single_precision(n: int) -> None:
    """After 200 turns after a factor that changes all the time; Q is EᵀE'."""
    generator = torch.Generator().manual_seed(0)
    basis = orthonormal(1, n).float()
    side = torch.eye(n)[None]
    for _ in range(200):
        samples = torch.randn(1, n, 2 * n, generator=generator) * torch.linspace(0.1, 3, n)[:, None]
        side = 0.8 * side + 0.2 * samples @ samples.mT / (2 * n)
        turn = turn_basis(side, basis)
        torch.testing.assert_close(basis.mT @ turn.basis, turn.rotation, rtol=0, atol=1e-5)
        basis = turn.basis
    error = basis.mT.double() @ basis.double() - torch.eye(n, dtype=DOUBLE)
    assert float(error.abs().max()) < 1e-6
