"""The SVD's routes against LAPACK's, on prescribed spectra and shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pullback._core import svd as module
from pullback._core.svd import polar_factor, polar_svd, svd
from tests.pairs import all_pairs
from tests.solvers.helpers import vector, with_spectrum

SHAPES = [(60, 60), (300, 60), (60, 300), (70, 60), (60, 61), (1, 1), (9, 1), (1, 9)]


def spectrum(name: str, k: int) -> Tensor:
    if name == "moderate":
        return torch.linspace(2, 0.1, k, dtype=torch.float64)
    if name == "geometric":
        return torch.logspace(0, -14, k, dtype=torch.float64)
    if name == "below round-off":
        return torch.logspace(3, -27, k, dtype=torch.float64)
    sigma = torch.ones(k, dtype=torch.float64)
    if name == "clusters":
        sigma[k // 3 :] = 1e-6
        sigma[2 * k // 3 :] = 1e-12
    elif name == "rank deficient":
        sigma = torch.logspace(0, -4, k, dtype=torch.float64)
        sigma[k // 2 + 1 :] = 0
    return sigma


SPECTRA = ["moderate", "geometric", "below round-off", "clusters", "rank deficient", "orthogonal"]
ROUTES = [False, True]


@pytest.fixture(autouse=True)
def always_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small matrices take the route of large ones."""
    monkeypatch.setattr(module, "_THRESHOLDS", module.SvdThresholds(small_entries=0))


def factors(a: Tensor, *, polar: bool) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V of what lies above round-off, by products with unit vectors."""
    decomposition = svd(a, polar=polar)
    limit = max(a.shape) * torch.finfo(a.dtype).eps
    piece = decomposition.select(decomposition.sigma > limit * decomposition.sigma[0])
    n, p = a.shape
    u = torch.stack([piece.left(e) for e in torch.eye(n, dtype=a.dtype)])
    v = torch.stack([piece.right(e) for e in torch.eye(p, dtype=a.dtype)])
    unit = torch.eye(len(piece.sigma), dtype=a.dtype)
    assert torch.allclose(piece.combine(unit), v.T, atol=30 * torch.finfo(a.dtype).eps)
    assert torch.allclose(piece.combine(unit[0]), v[:, 0], atol=30 * torch.finfo(a.dtype).eps)
    return u, piece.sigma, v


@pytest.mark.parametrize(
    ("dtype", "shape", "name", "polar"),
    all_pairs([torch.float64, torch.float32], SHAPES, SPECTRA, ROUTES),
)
def test_it_is_a_singular_value_decomposition(
    dtype: torch.dtype, shape: tuple[int, int], name: str, polar: bool
) -> None:
    """Backward stable: residual and orthogonality at round-off, whatever the spectrum."""
    k = min(shape)
    a = with_spectrum(spectrum(name, k), *shape).to(dtype)
    u, sigma, v = factors(a, polar=polar)
    tol = 40 * (1 + k**0.5) * torch.finfo(dtype).eps
    eye = torch.eye(len(sigma), dtype=dtype)
    want = torch.linalg.svdvals(a.double())
    assert bool((sigma.diff() <= 0).all())
    assert float((sigma.double() - want[: len(sigma)]).abs().max()) <= tol * float(want[0])
    assert float((u.T @ u - eye).norm()) <= tol
    assert float((v.T @ v - eye).norm()) <= tol
    cut = max(shape) * torch.finfo(dtype).eps * k**0.5
    assert float(((u * sigma) @ v.T - a).norm()) <= (tol + cut) * float(want[0])
    clear = int((want > 2 * max(shape) * torch.finfo(dtype).eps * want[0]).sum())
    assert clear <= len(sigma) <= int((want > cut / k**0.5 * want[0] / 2).sum())


@pytest.mark.parametrize("polar", ROUTES)
@pytest.mark.parametrize("shape", [(80, 50), (50, 50), (50, 80)])
def test_least_squares_at_condition_1e10_is_as_good_as_lapack(
    shape: tuple[int, int], polar: bool
) -> None:
    """The error of A⁺r is κ·ε times a small number, as that of the usual SVD."""
    k = min(shape)
    a = with_spectrum(torch.logspace(0, -10, k, dtype=torch.float64), *shape)
    u, s, vt = torch.linalg.svd(a, full_matrices=False)
    want = vt.T @ torch.ones(k).double()
    r = u @ s
    decomposition = svd(a, polar=polar)
    x = decomposition.combine(decomposition.left(r) / decomposition.sigma)
    assert float((x - want).norm() / want.norm()) <= 2e-6


@pytest.mark.parametrize("polar", ROUTES)
def test_zero_columns_and_rows(polar: bool) -> None:
    a = with_spectrum(spectrum("moderate", 20), 50, 20)
    a[:, ::3] = 0
    a[::4] = 0
    u, sigma, v = factors(a, polar=polar)
    assert len(sigma) == 13
    assert torch.allclose((u * sigma) @ v.T, a, atol=1e-13)


@pytest.mark.parametrize("polar", ROUTES)
@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 3), (0, 3), (3, 0), (0, 0)])
def test_zero_and_empty_matrices(shape: tuple[int, int], polar: bool) -> None:
    decomposition = svd(torch.zeros(shape).double(), polar=polar)
    assert decomposition.sigma.tolist() == [0.0] * min(shape)
    none = decomposition.select(decomposition.sigma > 0)
    assert none.left(torch.ones(shape[0]).double()).shape == (0,)
    assert none.right(torch.ones(shape[1]).double()).shape == (0,)
    assert none.combine(torch.ones(0).double()).tolist() == [0.0] * shape[1]


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e150])
def test_the_scale_of_the_matrix_does_not_matter(scale: float) -> None:
    a = with_spectrum(torch.logspace(0, -8, 12, dtype=torch.float64), 30, 12)
    for dtype in (torch.float64, torch.float32):
        if dtype is torch.float32 and not 1e-38 < scale < 1e38:
            continue
        sigma = svd((scale * a).to(dtype), polar=True).sigma.double() / scale
        assert torch.allclose(sigma, torch.linalg.svdvals(a), atol=20 * torch.finfo(dtype).eps)


def test_small_and_square_matrices_are_left_to_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    assert svd(vector(400).view(20, 20)).left_q is None
    assert svd(vector(400).view(40, 10)).left_q is not None
    monkeypatch.undo()
    assert svd(vector(400).view(40, 10)).left_q is None


def test_the_polar_factor_is_the_nearest_isometry() -> None:
    x = with_spectrum(torch.logspace(0, -15, 30, dtype=torch.float64), 30, 30)
    w = polar_factor(x / x.norm())
    assert float((w.T @ w - torch.eye(30).double()).norm()) < 1e-13
    h = w.T @ x
    assert float((h - h.T).norm()) < 1e-14
    assert float(torch.linalg.eigvalsh(h)[0]) > -1e-15


def test_a_polar_factor_that_failed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of low precision, say: the usual SVD takes over."""
    a = with_spectrum(torch.logspace(0, -8, 12, dtype=torch.float64), 12, 12)
    for wrong in (lambda x: 0.9 * polar_factor(x), lambda x: x * torch.nan, torch.zeros_like):
        monkeypatch.setattr(module, "polar_factor", wrong)
        decomposition = polar_svd(a)
        assert torch.allclose(
            (decomposition.u * decomposition.sigma) @ decomposition.v.T, a, atol=1e-15
        )
