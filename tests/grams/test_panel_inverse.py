"""Inverses by panels: against dense inverses, at bad conditions, and failures are reported."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pullback.grams.kronecker import cholesky_inverse, invert_factors
from pullback.grams.kronecker.panel_inverse import (
    PanelInverse,
    PanelSizes,
    allocate_padded,
    invert_by_panels,
)

DOUBLE = torch.float64


def make_matrices(count: int, n: int, decades: float = 1.0, seed: int = 0) -> Tensor:
    """Positive definite, with eigenvalues from 1 down to 10^-decades."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, n, n, dtype=DOUBLE, generator=generator)
    basis = torch.linalg.qr(normal)[0]
    return (basis * torch.logspace(0, -decades, n, dtype=DOUBLE)) @ basis.mT


def invert(stacks: list[Tensor], sizes: PanelSizes) -> list[PanelInverse]:
    padded_stacks: list[Tensor] = []
    for matrices in stacks:
        n = matrices.shape[-1]
        padded = allocate_padded(len(matrices), n, matrices, sizes)
        padded[:, :n, :n] = matrices
        padded_stacks.append(padded)
    return invert_by_panels(padded_stacks, sizes)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_many_sizes_at_once(shapes: list[tuple[int, int]], width: int, seed: int) -> None:
    """Every number of panels, odd ones too, and panels that are filled up."""
    stacks = [make_matrices(count, n, seed=seed + i) for i, (count, n) in enumerate(shapes)]
    sizes = PanelSizes(width=width, alignment=max(1, width // 3), strips=4)
    for matrices, inverse in zip(stacks, invert(stacks, sizes), strict=True):
        n = matrices.shape[-1]
        assert inverse.is_trusted.all()
        corner = inverse.matrices[:, :n, :n]
        torch.testing.assert_close(corner, torch.linalg.inv(matrices), rtol=1e-9, atol=1e-9)
        assert not inverse.matrices[:, n:, :n].any()


@pytest.mark.parametrize("decades", [2, 4, 6])
@pytest.mark.parametrize("n", [130, 257])
def test_single_precision_is_as_good_as_lapack(n: int, decades: int) -> None:
    matrices = make_matrices(2, n, decades).float()
    exact = torch.linalg.inv(matrices.double())
    (inverse,) = invert([matrices], PanelSizes(width=32))
    lapack = torch.cholesky_inverse(torch.linalg.cholesky(matrices)).double()
    error = (inverse.matrices[:, :n, :n].double() - exact).norm() / exact.norm()
    usual_error = (lapack - exact).norm() / exact.norm()
    assert inverse.is_trusted.all()
    assert error <= 3 * usual_error + 1e-6


@pytest.mark.parametrize("position", [0, 5, 11, 19])
@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_failure_is_reported_and_harms_no_other(position: int, value: float) -> None:
    poor = make_matrices(3, 20)
    poor[1, position, :] = 0
    poor[1, :, position] = 0
    poor[1, position, position] = value
    other = make_matrices(1, 7)
    first, second = invert([poor, other], PanelSizes(width=4, alignment=1))
    assert first.is_trusted.tolist() == [True, False, True]
    assert second.is_trusted.all()
    torch.testing.assert_close(first.matrices[[0, 2]], torch.linalg.inv(poor[[0, 2]]))
    torch.testing.assert_close(second.matrices, torch.linalg.inv(other))


def test_nothing_to_invert() -> None:
    assert invert_by_panels([]) == []


def test_factors_are_inverted_by_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: scaled and shifted factors of several shapes, one of which fails."""
    monkeypatch.setattr(cholesky_inverse, "_has_panels", lambda factor: factor.ndim == 3)
    poor = make_matrices(2, 9)
    poor[1] -= 2 * torch.eye(9, dtype=DOUBLE)
    factors = [make_matrices(2, 5), poor, make_matrices(1, 9), torch.rand(2, 6, dtype=DOUBLE)]
    scales = [2.0, 1.0, 0.5, 4.0]
    shifts = [torch.rand(len(factor), dtype=DOUBLE) for factor in factors]
    inverses = invert_factors(factors, scales, shifts)
    assert inverses.failed == [False, True, False, False]
    for i in (0, 2):
        eye = torch.eye(factors[i].shape[-1], dtype=DOUBLE)
        damped = factors[i] / scales[i] + shifts[i][:, None, None] * eye
        torch.testing.assert_close(inverses.matrices[i], torch.linalg.inv(damped))
