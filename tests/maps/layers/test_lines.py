"""Moments of patches by one product: against patches formed by `unfold`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.maps.layers import correlated

DOUBLE = torch.float64


def dense(module: nn.Conv2d, x: Tensor) -> tuple[Tensor, Tensor]:
    """From `F.unfold`, for padding with zeros."""
    a = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)  # pyright: ignore[reportArgumentType]
    a = a.transpose(1, 2).flatten(0, 1)
    return a.T @ a, a.sum(0)


OPTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "bias": False},
    {"kernel_size": (3, 2), "dilation": (1, 2), "padding": (2, 1)},
    {"kernel_size": 1},
    {"kernel_size": 1, "stride": 2, "bias": False},
    {"kernel_size": 1, "padding": 1},
]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("memory", [2**28, 1])
def test_moments(monkeypatch: pytest.MonkeyPatch, memory: int, options: dict, last: bool) -> None:
    monkeypatch.setattr(correlated, "_MEMORY", memory)
    module = nn.Conv2d(3, 4, **options).double()
    x = torch.randn(40, 3, 7, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    want, ones = dense(module, x)
    if last:
        x = x.to(memory_format=torch.channels_last)
    second, first = correlated.line_moment(module, x)
    torch.testing.assert_close(second[0], want)
    if module.bias is not None:
        torch.testing.assert_close(first[0], ones)
    torch.testing.assert_close(
        correlated.channel_lines(x) @ correlated.channel_lines(x).T,
        torch.einsum("nchw,ndhw->cd", x, x),
    )


def test_other_dimensions_and_paddings() -> None:
    from pullback.maps.layers.patches import patches

    g = torch.Generator().manual_seed(1)
    for module, shape in (
        (nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (4, 2, 9)),
        (nn.Conv3d(2, 3, (2, 1, 3), stride=(1, 2, 1), padding=1), (2, 2, 4, 5, 4)),
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 5, 4)),
    ):
        x = torch.randn(shape, dtype=DOUBLE, generator=g)
        a = patches(module, x).transpose(0, 1).flatten(1, 2)[0]
        second, first = correlated.line_moment(module, x)
        torch.testing.assert_close(second[0], a.T @ a)
        torch.testing.assert_close(first[0], a.sum(0))
