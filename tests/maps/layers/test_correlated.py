"""Moments of 3×3 patches from a correlation, and of channels: against the dense sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.maps.layers import conv, correlated, find, patches
from pullback.maps.layers.correlated import (
    channel_moment,
    channel_moments,
    correlated_moment,
    correlated_moments,
    correlates,
)
from pullback.maps.layers.moments import Sharing

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
    x = x.to(memory_format=torch.channels_last) if last else x
    torch.testing.assert_close(correlated_moment(x), a.T @ a)


def test_a_cut_out_of_a_larger_tensor() -> None:
    x = draw(4, 6, 9, 9)[::2, 1:5:2, 2:8, 1:6]
    a = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(correlated_moment(x), a.T @ a)


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
    module, x = nn.Conv2d(4, 4, 3, padding=1), draw(3, 4, 8, 8)
    assert not correlates(module, x.bfloat16())
    assert not correlates(module, x[..., :3])
    assert not correlates(module, x[:0])


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (4, 9, 2, 2), (1, 3, 5, 6), (5, 3, 8), (0, 3, 2)])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
def test_channels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape).to(dtype)
    want = torch.einsum("ncp,ndp->cd", x.double().flatten(2), x.double().flatten(2))
    for same in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
        got = channel_moment(same)
        assert got.dtype == (DOUBLE if dtype == DOUBLE else torch.float32)
        torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-5)
    some = [x, 2 * x, -3 * x] if len(x) else []
    for count in range(1, len(some) + 1):
        got = channel_moments(some[:count])
        assert got.dtype == (DOUBLE if dtype == DOUBLE else torch.float32)
        for one, factor in zip(got, (1, 4, 9), strict=False):
            torch.testing.assert_close(one.double(), factor * want, rtol=2e-2, atol=1e-5)
            if dtype != torch.bfloat16:
                torch.testing.assert_close(one.double(), factor * want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (3, 2, 5, 7)])
def test_several_at_once(shape: tuple[int, ...]) -> None:
    some = [draw(*shape) * k for k in (1, -2, 3)]
    found = correlated_moments(some)
    assert found.is_contiguous()
    for x, got in zip(some, found, strict=True):
        a = F.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(got, a.T @ a)


@pytest.mark.parametrize("together", [1, 2**28])
def test_all_inputs_of_a_network(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """Whatever is formed at once: the same moments as one by one, in the order of the uses."""
    for module in (conv, correlated, patches):
        monkeypatch.setattr(module, "by_lines", lambda x, groups: groups == 1)
    monkeypatch.setattr(conv, "_TOGETHER", together)
    modules = [
        nn.Conv2d(3, 4, 3, padding=1),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.Conv2d(3, 4, 3, padding=1, stride=2),
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(3, 6, 3, padding=1, groups=3),
    ]
    shapes = [(2, 3, 6, 6), (2, 3, 6, 6), (2, 3, 6, 6), (2, 3, 6, 6), (2, 3, 6, 6)]
    uses = [(m, draw(*s) * (i + 1)) for i, (m, s) in enumerate(zip(modules, shapes, strict=True))]
    uses += [(modules[0], draw(2, 3, 5, 6)), (modules[0], 7 * draw(2, 3, 6, 6))]
    wide, plain = nn.Conv2d(7, 4, 1), nn.Conv2d(7, 4, 1, bias=False)
    uses += [
        (modules[3], 5 * draw(2, 3, 6, 6)),
        (wide, draw(2, 7, 2, 3)),
        (plain, draw(2, 7, 2, 3)),
    ]
    uses += [(wide, 2 * draw(2, 7, 2, 3)), (wide, draw(7, 2, 3)), (modules[3], draw(3, 6, 6))]
    uses += [(wide, draw(2, 2, 3, 7).movedim(3, 1)), (nn.Conv2d(7, 4, 1, 2), draw(2, 7, 2, 3))]
    layer = find(modules[0])
    assert layer is not None
    for sharing in (Sharing(), Sharing(reduce=True), Sharing(longest=5)):
        found = layer.inputs_of([(m, x, None) for m, x in uses], sharing)
        for (module, x), got in zip(uses, found, strict=True):
            want = layer.inputs(module, x, sharing, None)
            torch.testing.assert_close(got.second, want.second)
            assert got.places == want.places
            if module.bias is not None:
                torch.testing.assert_close(got.first, want.first)
