"""The row space of a matrix of low rank, and the SVD in it, against LAPACK's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pullback._core import row_space
from pullback._core.row_space import find_row_space
from pullback._core.svd import svd
from pullback.grams import Rows
from pullback.solvers import PseudoInverse
from tests.solvers.helpers import vector, with_spectrum

CUTOFF = 5e-14
SHAPES = [(900, 300), (300, 900), (320, 300)]


def decaying(n: int, p: int) -> Tensor:
    """A matrix whose singular values pass the cut-off at half of its rank."""
    return with_spectrum(torch.logspace(0, -27, min(n, p), dtype=torch.float64), n, p)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_triples_above_the_cutoff(shape: tuple[int, int]) -> None:
    a = decaying(*shape)
    exact = torch.linalg.svdvals(a)
    part = svd(a, cutoff=CUTOFF)
    assert len(part.sigma) < 0.75 * min(shape)
    part = part.select(part.sigma > CUTOFF * part.sigma[0])
    count = len(part.sigma)
    assert count == int((exact > CUTOFF * exact[0]).sum())
    assert torch.allclose(part.sigma, exact[:count], rtol=1e-2, atol=0)
    unit = torch.eye(count, dtype=a.dtype)
    right = part.combine(unit)
    left = torch.stack([part.left(column) for column in a.T], 1)  # Uᵀ A
    assert torch.allclose(right @ right.T, unit, atol=1e-12)
    assert (left - part.sigma[:, None] * right).abs().max() < 1e-13 * exact[0]


@pytest.mark.parametrize("damping", [0.0, 1e-20, 1e-8])
def test_solution_is_that_of_the_whole_factorization(damping: float) -> None:
    a = decaying(900, 300)
    r = a @ vector(300)
    solver = PseudoInverse(rcond=CUTOFF)
    x = solver.solve(solver.init(Rows(a)), a.T @ r, damping, whitened=r).x
    u, sigma, vt = torch.linalg.svd(a, full_matrices=False)
    is_kept = sigma > CUTOFF * sigma[0]
    filtered = torch.where(is_kept, sigma / (sigma.square() + damping), 0.0)
    dense = vt.T @ (filtered * (u.T @ r))
    assert (a @ (x - dense)).norm() < 1e-12 * r.norm()


def test_full_rank_has_no_smaller_basis() -> None:
    assert find_row_space(torch.randn(900, 300, dtype=torch.float64), CUTOFF) is None


def test_matrix_of_zeros() -> None:
    part = svd(torch.zeros(900, 300, dtype=torch.float64), cutoff=CUTOFF)
    assert float(part.sigma.max()) == 0


def test_small_matrix_is_decomposed_as_a_whole() -> None:
    assert find_row_space(decaying(300, 100), CUTOFF) is None


def test_unusual_rows_are_in_the_basis() -> None:
    """Rows of single data, each with a direction that no other row has."""
    a = decaying(900, 300)
    a[:40] = 0.0
    a[:40, :40] = 1e-6 * torch.eye(40, dtype=a.dtype)
    basis = find_row_space(a, CUTOFF)
    assert basis is not None
    assert (a - (a @ basis) @ basis.T).norm() < CUTOFF * a.norm()


def test_missing_direction_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the combinations leave out a row, the checks see it and no basis is returned."""
    combine = row_space._combine_rows

    def combine_all_but_first(a: Tensor, count: int, generator: torch.Generator) -> Tensor:
        return combine(a[1:], count, generator)

    a = decaying(900, 300)
    a[0] = 1e-9 * vector(300)
    monkeypatch.setattr(row_space, "_combine_rows", combine_all_but_first)
    assert find_row_space(a, CUTOFF) is None
