"""Moments of 3×3 patches from a correlation, against the dense sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.maps.layers.correlated import correlated_moments, correlates

DOUBLE = torch.float64


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 4), (3, 2, 5, 7), (1, 1, 4, 9), (2, 4, 8, 8), (3, 2, 2, 2), (2, 1, 3, 2)]
)
def test_from_a_correlation(shape: tuple[int, ...], last: bool) -> None:
    x = draw(*shape)
    a = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
    if last:
        x = x.to(memory_format=torch.channels_last)
    else:
        x = x
    torch.testing.assert_close(correlated_moments([x])[0], a.T @ a)


def test_a_cut_out_of_a_larger_tensor() -> None:
    x = draw(4, 6, 9, 9)[::2, 1:5:2, 2:8, 1:6]
    a = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(correlated_moments([x])[0], a.T @ a)


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 5, "padding": 2},
        {"kernel_size": (3, 1), "padding": (1, 0)},
        {"kernel_size": 3, "padding": 1, "stride": 2},
        {"kernel_size": 3, "padding": 2, "dilation": 2},
        {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
        {"kernel_size": 3, "padding": 1, "groups": 2},
    ],
    ids=str,
)
def test_other_convolutions_have_no_such_form(options: dict) -> None:
    x = draw(3, 4, 8, 8)
    assert correlates(nn.Conv2d(4, 4, 3, padding=1), x)
    assert correlates(nn.Conv2d(4, 4, 3, padding="same"), x)
    assert not correlates(nn.Conv2d(4, 4, **options), x)


def test_not_where_it_would_be_rounded_or_is_mostly_edge() -> None:
    module = nn.Conv2d(4, 4, 3, padding=1)
    x = draw(3, 4, 8, 8)
    assert not correlates(module, x.bfloat16())
    assert not correlates(module, x[..., :3])
    assert not correlates(module, x[:0])


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (3, 2, 5, 7)])
def test_several_at_once(shape: tuple[int, ...]) -> None:
    some = [draw(*shape) * k for k in (1, -2, 3)]
    found = correlated_moments(some)
    assert found.is_contiguous()
    for x, got in zip(some, found, strict=True):
        a = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(got, a.T @ a)
