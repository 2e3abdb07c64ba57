"""Inverses of many sides of different sizes at once, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pullback.grams.kronecker import inverses, inverting

DOUBLE = torch.float64
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def matrices(count: int, n: int, decades: float = 1.0, seed: int = 0) -> Tensor:
    """Positive definite, with eigenvalues from 1 down to 10^-decades."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(count, n, n, dtype=DOUBLE, generator=g))[0]
    return (q * torch.logspace(0, -decades, n, dtype=DOUBLE)) @ q.mT


@pytest.mark.parametrize("entries", [1, 2**25])
def test_scaled_and_shifted_sides(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    monkeypatch.setattr(inverting, "_AT_ONCE", entries)
    every = [matrices(2, 5), matrices(1, 140), matrices(1, 130), torch.rand(2, 6, dtype=DOUBLE)]
    kept = [m.clone() for m in every]
    shifts = [torch.rand(len(m), dtype=DOUBLE) for m in every]
    for scales in ([2.0, 3.0, 0.5, 4.0], [0.3] * 4, None):
        found = inverses(every, scales=scales, shifts=shifts)
        assert not any(found.failed)
        for i, m in enumerate(every):
            dense = torch.diag_embed(m) if m.ndim == 2 else m
            eye = torch.eye(m.shape[-1], dtype=DOUBLE)
            dense = dense / (1.0 if scales is None else scales[i]) + shifts[i][:, None, None] * eye
            want = torch.linalg.inv(dense)
            got = torch.diag_embed(found.sides[i]) if m.ndim == 2 else found.sides[i]
            torch.testing.assert_close(got, want)
    assert all(torch.equal(a, b) for a, b in zip(every, kept, strict=True))


@pytest.mark.parametrize("entries", [1, 2**25])
def test_one_of_many_fails(monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    monkeypatch.setattr(inverting, "_AT_ONCE", entries)
    poor = matrices(2, 9)
    poor[1] -= 2 * torch.eye(9, dtype=DOUBLE)
    found = inverses([matrices(1, 9), poor, matrices(1, 8)])
    assert found.failed == [False, True, False]


@cuda
@pytest.mark.cuda
def test_a_gpu_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [matrices(2, n).float().cuda() for n in (20, 100, 130, 400, 401)]
    inverses(every)
    torch.cuda.set_sync_debug_mode("error")
    try:
        monkeypatch.setattr(inverting, "_failed", lambda told, count: [False] * count)
        found = inverses(every)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for m, inverse in zip(every, found.sides, strict=True):
        torch.testing.assert_close(inverse, torch.linalg.inv(m), rtol=1e-3, atol=1e-3)
