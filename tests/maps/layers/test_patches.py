"""Moments of convolution patches, against the patches themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback.maps.layers import patches as module_under_test
from pullback.maps.layers.patches import patch_moment, patches

Make = Callable[[], nn.Module]

CASES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "1×1": (lambda: nn.Conv2d(5, 2, 1), (3, 5, 4, 6)),
    "1×1 strided, padded": (lambda: nn.Conv2d(5, 2, 1, stride=(2, 3), padding=1), (3, 5, 4, 6)),
    "3×3": (lambda: nn.Conv2d(3, 2, 3), (4, 3, 8, 7)),
    "3×3 padded": (lambda: nn.Conv2d(3, 2, 3, padding=1), (4, 3, 5, 6)),
    "5×5": (lambda: nn.Conv2d(2, 2, 5, padding=2), (3, 2, 9, 8)),
    "3×5, other paddings": (lambda: nn.Conv2d(2, 2, (3, 5), padding=(4, 1)), (3, 2, 6, 8)),
    "even, same": (lambda: nn.Conv2d(2, 2, (2, 4), padding="same"), (3, 2, 6, 7)),
    "dilated": (lambda: nn.Conv2d(2, 2, 3, dilation=(2, 3), padding=3), (3, 2, 9, 8)),
    "dilated beyond the window": (lambda: nn.Conv2d(2, 2, 3, dilation=4), (3, 2, 10, 9)),
    "one row of places": (lambda: nn.Conv2d(2, 2, 3), (3, 2, 3, 9)),
    "one place": (lambda: nn.Conv2d(2, 2, 4), (3, 2, 4, 4)),
    "kernel on one axis": (lambda: nn.Conv2d(3, 2, (1, 7), padding=(0, 3)), (3, 3, 4, 9)),
    "kernel on the other": (lambda: nn.Conv2d(3, 2, (7, 1), padding=(3, 0)), (3, 3, 9, 4)),
    "reflect": (lambda: nn.Conv2d(2, 2, 3, padding=2, padding_mode="reflect"), (3, 2, 6, 5)),
    "replicate": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="replicate"), (3, 2, 6, 5)),
    "circular": (
        lambda: nn.Conv2d(2, 2, (3, 4), padding="same", padding_mode="circular"),
        (3, 2, 6, 5),
    ),
    "groups": (lambda: nn.Conv2d(6, 4, 3, groups=2, padding=1), (3, 6, 7, 6)),
    "depthwise": (lambda: nn.Conv2d(5, 10, 3, groups=5, padding=1), (3, 5, 7, 6)),
    "strided": (lambda: nn.Conv2d(3, 2, 3, stride=2, padding=1), (3, 3, 8, 7)),
    "strided on one axis": (lambda: nn.Conv2d(3, 2, 5, stride=(3, 1), padding=2), (3, 3, 8, 9)),
    "disjoint": (lambda: nn.Conv2d(3, 2, 4, stride=4, groups=1), (3, 3, 9, 8)),
    "1d": (lambda: nn.Conv1d(3, 2, 5, padding=2), (4, 3, 11)),
    "1d dilated, grouped": (lambda: nn.Conv1d(4, 2, 3, dilation=3, groups=2), (4, 4, 11)),
    "1d causal": (lambda: nn.Conv1d(4, 2, 4, padding=3), (4, 4, 3)),
    "1d strided": (lambda: nn.Conv1d(3, 2, 5, stride=2), (4, 3, 11)),
    "3d": (lambda: nn.Conv3d(2, 2, 3, padding=1), (2, 2, 4, 5, 6)),
    "3d mixed": (
        lambda: nn.Conv3d(4, 2, (3, 2, 3), stride=(2, 1, 1), dilation=(1, 2, 1), groups=2),
        (2, 4, 5, 6, 5),
    ),
    "3d thin": (lambda: nn.Conv3d(2, 2, (3, 1, 3), stride=(1, 2, 1)), (2, 2, 5, 5, 5)),
}


def dense(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    a = patches(module, x)
    return torch.einsum("bgpi,bgpj->gij", a, a), a.sum((0, 2))


@pytest.fixture(params=["by size", "slide", "fold"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    gain = {"by size": module_under_test._GAIN, "slide": 0.0, "fold": float("inf")}
    monkeypatch.setattr(module_under_test, "_GAIN", gain[request.param])
    return request.param


@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_patches(case: str, route: str) -> None:
    make, shape = CASES[case]
    module, x = make().double(), torch.randn(shape, dtype=torch.float64)
    for got, want in zip(patch_moment(module, x), dense(module, x), strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "_CACHE", 1)
    module, x = nn.Conv2d(1, 2, 2).double(), torch.randn(50, 1, 6, 6, dtype=torch.float64)
    seen: list[int] = []
    folded = module_under_test._folded

    def spy(some: Tensor, *rest: Any) -> Tensor:
        seen.append(len(some))
        return folded(some, *rest)

    monkeypatch.setattr(module_under_test, "_folded", spy)
    for got, want in zip(patch_moment(module, x), dense(module, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    assert len(seen) > 1
    assert sum(seen) == 50


def test_the_moment_is_a_statistic() -> None:
    second, first = patch_moment(nn.Conv2d(2, 3, 3), torch.randn(2, 2, 8, 8, requires_grad=True))
    assert not second.requires_grad
    assert not first.requires_grad


def test_no_samples_have_no_moment() -> None:
    second, first = patch_moment(nn.Conv2d(2, 3, 3, padding=1), torch.randn(0, 2, 8, 8))
    assert second.shape == (1, 18, 18)
    assert not bool(second.any())
    assert not bool(first.any())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_layouts(layout: torch.memory_format) -> None:
    module = nn.Conv2d(4, 2, 3, padding=1).double()
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64).contiguous(memory_format=layout)
    for got, want in zip(patch_moment(module, x), dense(module, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, groups: int, route: str) -> None:
    module = nn.Conv2d(4, 2, 3, padding=1, groups=groups)
    x = (1 + torch.randn(8, 4, 12, 12)).to(dtype)
    for got, want in zip(patch_moment(module, x), dense(module, x.double()), strict=True):
        assert got.dtype == torch.float32
        assert float((got - want).norm() / want.norm()) < 1e-6


def test_float32_loses_nothing_by_sliding(route: str) -> None:
    """Edges are subtracted: an image that is large at its edge must not spoil the rest."""
    torch.manual_seed(0)
    module, x = nn.Conv2d(8, 2, 5, padding=0), torch.randn(16, 8, 16, 16)
    x[..., 0] *= 100
    (second, first), wants = patch_moment(module, x), dense(module, x.double())
    assert second.dtype == torch.float32
    assert float((second - wants[0]).norm() / wants[0].norm()) < 1e-6
    assert float((first - wants[1]).norm() / wants[1].norm()) < 3e-6
    assert float(torch.linalg.eigvalsh(second).min()) > -1e-5 * float(
        second.diagonal(0, 1, 2).max()
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 64])
def test_on_cuda(dtype: torch.dtype, groups: int, route: str) -> None:
    module = nn.Conv2d(64, 64, 3, padding=1, groups=groups)
    x = torch.randn(16, 64, 12, 12).to(dtype)
    for got, want in zip(patch_moment(module, x.cuda()), dense(module, x.double()), strict=True):
        assert float((got.cpu() - want).norm() / want.norm()) < 1e-5
