"""Moments of several inputs side by side, some of them multiplied at once: against dense sums."""

from __future__ import annotations

import pytest
import torch

from pullback.maps.layers import moments


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_in_pieces(monkeypatch: pytest.MonkeyPatch, batch_size: int, masked: bool) -> None:
    g = torch.Generator().manual_seed(batch_size)
    uses = [torch.randn(2, 5, 3, generator=g) for _ in range(4)]
    uses[1] = uses[1].transpose(0, 1).contiguous().transpose(0, 1)  # not row by row in memory
    if masked:
        keep = [torch.arange(10) % k > 0 for k in (3, 2, 5, 4)]
    else:
        keep = None
    limits = moments._Limits(stacked_bytes=batch_size * uses[0].nbytes)
    monkeypatch.setattr(moments, "_LIMITS", limits)
    actual = moments.compute_stacked_moments(uses, keep)
    for i, (x, m) in enumerate(zip(uses, actual, strict=True)):
        rows = x.reshape(-1, 3).double()
        if keep is not None:
            rows = rows[keep[i]]
        assert float(m.positions) == len(rows)
        torch.testing.assert_close(m.second[0].double(), rows.T @ rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(m.first[0].double(), rows.sum(0), rtol=1e-5, atol=1e-5)


def test_without_places() -> None:
    actual = moments.compute_stacked_moments([torch.zeros(0, 3), torch.zeros(0, 3)])
    assert [m.second.abs().sum() + m.first.abs().sum() for m in actual] == [0, 0]
    assert [m.positions for m in actual] == [0, 0]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [16, 2040, 2304])
def test_half_precision_on_a_gpu(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(513, n, device="cuda").to(dtype)
    want = x.double().T @ x.double()
    actual = moments.compute_stacked_moments([x, x + 1])
    torch.testing.assert_close(
        actual[1].first[0].double(), (x + 1).double().sum(0), rtol=1e-5, atol=1e-3
    )
    torch.testing.assert_close(actual[0].second[0].double(), want, rtol=1e-5, atol=1e-3)
