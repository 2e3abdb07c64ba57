"""Inverses by panels: against dense inverses, at bad conditions, and what fails is told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pullback.grams.kronecker import blocked, inverses, inverting

DOUBLE = torch.float64
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def matrices(count: int, n: int, decades: float = 1.0, seed: int = 0) -> Tensor:
    """Positive definite, with eigenvalues from 1 down to 10^-decades."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(count, n, n, dtype=DOUBLE, generator=g))[0]
    return (q * torch.logspace(0, -decades, n, dtype=DOUBLE)) @ q.mT


def stacked(some: Tensor, panel: int) -> Tensor:
    n = some.shape[-1]
    out = blocked.room(len(some), n, some, panel)
    out[:, :n, :n] = some
    return out


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 999),
)
@settings(max_examples=80, deadline=None)
def test_many_sizes_at_once(shapes: list[tuple[int, int]], panel: int, seed: int) -> None:
    """Every number of panels, odd ones too, and panels that are filled up."""
    every = [matrices(c, n, seed=seed + i) for i, (c, n) in enumerate(shapes)]
    found = blocked.invert([stacked(m, panel) for m in every], panel)
    for m, (inverse, good) in zip(every, found, strict=True):
        n = m.shape[-1]
        assert good.all()
        torch.testing.assert_close(inverse[:, :n, :n], torch.linalg.inv(m), rtol=1e-9, atol=1e-9)
        assert torch.equal(inverse, inverse.mT)
        assert not inverse[:, n:, :n].any()


@pytest.mark.parametrize("n", [3, 8, 31, 32, 45, 64, 77])
@pytest.mark.parametrize("panel", [4, 8])
def test_large_triangles_are_multiplied_by_strips(
    monkeypatch: pytest.MonkeyPatch, n: int, panel: int
) -> None:
    monkeypatch.setattr(blocked, "_WORTH", 1)
    m = matrices(2, n)
    ((found, good),) = blocked.invert([stacked(m, panel)], panel)
    assert good.all()
    torch.testing.assert_close(found[:, :n, :n], torch.linalg.inv(m), rtol=1e-9, atol=1e-9)
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("decades", [2, 4, 6])
@pytest.mark.parametrize("n", [130, 257])
def test_single_precision_is_as_good_as_lapack(n: int, decades: int) -> None:
    m = matrices(2, n, decades).float()
    want = torch.linalg.inv(m.double())
    ((found, good),) = blocked.invert([stacked(m, 32)], 32)
    lapack = torch.cholesky_inverse(torch.linalg.cholesky(m)).double()
    error, usual = ((x - want).norm() / want.norm() for x in (found[:, :n, :n].double(), lapack))
    assert good.all()
    assert error <= 3 * usual + 1e-6


@pytest.mark.parametrize("at", [0, 5, 11, 19])
@pytest.mark.parametrize("what", [-1.0, 0.0, float("nan"), float("inf")])
def test_what_fails_is_told_and_harms_no_other(at: int, what: float) -> None:
    m = matrices(3, 20)
    m[1, at, :] = m[1, :, at] = 0
    m[1, at, at] = what
    other = matrices(1, 7)
    (one, good), (two, fine) = blocked.invert([stacked(m, 4), stacked(other, 4)], 4)
    assert good.tolist() == [True, False, True]
    assert fine.all()
    torch.testing.assert_close(one[[0, 2]], torch.linalg.inv(m[[0, 2]]))
    torch.testing.assert_close(two[:, :7, :7], torch.linalg.inv(other))


def test_nothing_to_invert() -> None:
    assert blocked.invert([]) == []


@pytest.mark.parametrize("panels", [False, True])
def test_scaled_and_shifted_sides(monkeypatch: pytest.MonkeyPatch, panels: bool) -> None:
    monkeypatch.setattr(inverting, "_by_panels", lambda side: panels)
    every = [matrices(2, 5), matrices(1, 140), matrices(1, 130), torch.rand(2, 6, dtype=DOUBLE)]
    kept = [m.clone() for m in every]
    shifts = [torch.rand(len(m), dtype=DOUBLE) for m in every]
    for scales in ([2.0, 3.0, 0.5, 4.0], [1.0] * 4):
        found = inverses(every, scales, shifts)
        assert not any(found.failed)
        for i, m in enumerate(every):
            if m.ndim == 2:
                dense = torch.diag_embed(m)
            else:
                dense = m
            eye = torch.eye(m.shape[-1], dtype=DOUBLE)
            dense = dense / scales[i] + shifts[i][:, None, None] * eye
            want = torch.linalg.inv(dense)
            if m.ndim == 2:
                got = torch.diag_embed(found.sides[i])
            else:
                got = found.sides[i]
            torch.testing.assert_close(got, want)
    assert all(torch.equal(a, b) for a, b in zip(every, kept, strict=True))


@pytest.mark.parametrize("panels", [False, True])
def test_one_of_many_fails(monkeypatch: pytest.MonkeyPatch, panels: bool) -> None:
    monkeypatch.setattr(inverting, "_by_panels", lambda side: panels)
    poor = matrices(2, 9)
    poor[1] -= 2 * torch.eye(9, dtype=DOUBLE)
    every = [matrices(1, 9), poor, matrices(1, 8)]
    found = inverses(every, [1.0] * 3, [m.new_zeros(len(m)) for m in every])
    assert found.failed == [False, True, False]


@cuda
@pytest.mark.cuda
def test_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [matrices(2, n).float().cuda() for n in (20, 100, 130, 400, 401)]
    plain = [1.0] * len(every), [m.new_zeros(len(m)) for m in every]
    inverses(every, *plain)
    torch.cuda.set_sync_debug_mode("error")
    try:
        monkeypatch.setattr(inverting, "_failed", lambda told, count: [False] * count)
        found = inverses(every, *plain)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for m, inverse in zip(every, found.sides, strict=True):
        torch.testing.assert_close(inverse, torch.linalg.inv(m), rtol=1e-3, atol=1e-3)
