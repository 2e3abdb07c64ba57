"""Sums over places in one pass: the same as torch's, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.maps.layers import fused

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def close(got: tuple[Tensor, Tensor] | None, want: tuple[Tensor, Tensor]) -> None:
    assert got is not None
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-4 * float(w.abs().max()))


def test_nothing_is_gained_on_a_cpu() -> None:
    x = torch.randn(2, 3, 4)
    assert fused.channel_sums(x, x) is None
    assert fused.norm_sums(x, x, 1e-5, centered=True) is None


class TestOnAGPU:
    pytestmark = needs_cuda

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("shape", [(3, 5, 7, 7), (2, 64, 33), (1, 1, 1, 1), (4, 130, 40, 61)])
    def test_channels(self, shape: tuple[int, ...], last: bool, dtype: torch.dtype) -> None:
        x, d = torch.randn(2, *shape, device="cuda").to(dtype)
        if last:
            x, d = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, d))
        axes = tuple(range(2, x.ndim))
        want = (x.double() * d.double()).sum(axes), d.double().sum(axes)
        close(fused.channel_sums(x, d), want)

    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize("shape", [(3, 21, 12), (8, 100, 768), (1, 1, 1), (2, 9, 5000)])
    def test_norms(self, shape: tuple[int, ...], centered: bool) -> None:
        x, d = torch.randn(2, *shape, device="cuda")
        x = 3 * x + 2
        norm = F.layer_norm if centered else F.rms_norm
        hat = norm(x.double(), shape[-1:], eps=1e-5)
        want = (hat * d.double()).sum(1), d.double().sum(1)
        close(fused.norm_sums(x, d, 1e-5, centered=centered), want)

    def test_what_does_not_fit_is_left(self) -> None:
        x = torch.randn(2, 3, 4, device="cuda")
        assert fused.channel_sums(x.double(), x.double()) is None
        assert fused.channel_sums(x[..., ::2], x[..., ::2]) is None
        assert fused.norm_sums(x.transpose(1, 2), x.transpose(1, 2), 1e-5, centered=True) is None
        wide = torch.randn(1, 2, 10_000, device="cuda")
        assert fused.norm_sums(wide, wide, 1e-5, centered=True) is None
        assert fused.channel_sums(x[:0], x[:0]) is None
