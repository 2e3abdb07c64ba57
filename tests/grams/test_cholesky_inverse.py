"""Inverses of many factors together: against dense inverses, and failures are reported."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pullback.grams.kronecker import cholesky_inverse, invert_factors

DOUBLE = torch.float64
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_matrices(count: int, n: int, decades: float = 1.0, seed: int = 0) -> Tensor:
    """Positive definite, with eigenvalues from 1 down to 10^-decades."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, n, n, dtype=DOUBLE, generator=generator)
    basis = torch.linalg.qr(normal)[0]
    return (basis * torch.logspace(0, -decades, n, dtype=DOUBLE)) @ basis.mT


@pytest.mark.parametrize("scales", [[2.0, 3.0, 0.5, 4.0], [1.0] * 4])
def test_scaled_and_shifted_factors(scales: list[float]) -> None:
    diagonal = torch.rand(2, 6, dtype=DOUBLE)
    factors = [make_matrices(2, 5), make_matrices(1, 140), make_matrices(1, 130), diagonal]
    copies = [factor.clone() for factor in factors]
    shifts = [torch.rand(len(factor), dtype=DOUBLE) for factor in factors]
    inverses = invert_factors(factors, scales, shifts)
    assert not any(inverses.failed)
    for factor, inverse, scale, shift in zip(
        factors, inverses.matrices, scales, shifts, strict=True
    ):
        eye = torch.eye(factor.shape[-1], dtype=DOUBLE)
        if factor.ndim == 2:
            factor = torch.diag_embed(factor)
            inverse = torch.diag_embed(inverse)
        want = torch.linalg.inv(factor / scale + shift[:, None, None] * eye)
        torch.testing.assert_close(inverse, want)
    assert all(torch.equal(factor, copy) for factor, copy in zip(factors, copies, strict=True))


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("position", [0, 5, 19])
def test_a_failure_is_reported_and_harms_no_other(position: int, value: float) -> None:
    poor = make_matrices(3, 20)
    poor[1, position, :] = 0
    poor[1, :, position] = 0
    poor[1, position, position] = value
    factors = [make_matrices(1, 20), poor, make_matrices(1, 7)]
    inverses = invert_factors(factors, [1.0] * 3, [m.new_zeros(len(m)) for m in factors])
    assert inverses.failed == [False, True, False]
    torch.testing.assert_close(inverses.matrices[0], torch.linalg.inv(factors[0]))
    torch.testing.assert_close(inverses.matrices[1][[0, 2]], torch.linalg.inv(poor[[0, 2]]))
    torch.testing.assert_close(inverses.matrices[2], torch.linalg.inv(factors[2]))


def test_cholesky_factors() -> None:
    factors = [make_matrices(2, 9), torch.rand(1, 4, dtype=DOUBLE)]
    shifts = [torch.ones(len(factor), dtype=DOUBLE) for factor in factors]
    lower, reciprocal = invert_factors(factors, [1.0, 1.0], shifts, as_cholesky=True).matrices
    torch.testing.assert_close(lower @ lower.mT, factors[0] + torch.eye(9, dtype=DOUBLE))
    torch.testing.assert_close(reciprocal, 1 / (factors[1] + 1))


def test_nothing_to_invert() -> None:
    assert invert_factors([], [], []).matrices == []


@cuda
@pytest.mark.cuda
def test_a_gpu_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = [make_matrices(2, n).float().cuda() for n in (20, 100, 130, 400, 401)]
    scales = [1.0] * len(factors)
    shifts = [factor.new_zeros(len(factor)) for factor in factors]
    invert_factors(factors, scales, shifts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        monkeypatch.setattr(cholesky_inverse, "_find_failed", lambda stacks, count: [False] * count)
        inverses = invert_factors(factors, scales, shifts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for factor, inverse in zip(factors, inverses.matrices, strict=True):
        torch.testing.assert_close(inverse, torch.linalg.inv(factor), rtol=1e-3, atol=1e-3)
