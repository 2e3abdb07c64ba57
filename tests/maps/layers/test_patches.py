"""Moments of convolution patches and of channels, against the patches themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pullback.maps.layers import conv, find_layer
from pullback.maps.layers import patches as module_under_test
from pullback.maps.layers.moments import Sharing
from pullback.maps.layers.patch_correlation import can_correlate, correlate_patches
from pullback.maps.layers.patches import (
    compute_channel_moment,
    compute_channel_moments,
    unfold_patches,
)
from pullback.maps.layers.registry import LayerInput

Make = Callable[[], nn.Module]
DOUBLE = torch.float64

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
    "1d circular": (
        lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"),
        (4, 2, 9),
    ),
    "3d thin": (lambda: nn.Conv3d(2, 2, (3, 1, 3), stride=(1, 2, 1)), (2, 2, 5, 5, 5)),
}


def dense(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    a = unfold_patches(module, x)
    return torch.einsum("bgpi,bgpj->gij", a, a), a.sum((0, 2))


def moments(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    actual = find_layer(module).input_moments(module, x, Sharing(), None)
    assert actual.positions == len(x) * unfold_patches(module, x).shape[2]
    return actual.second, actual.first


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("memory", [1, 2**24])
@pytest.mark.parametrize("case", CASES)
def test_moments_are_those_of_the_patches(
    case: str, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "_MEMORY", memory)
    make, shape = CASES[case]
    module = make().double()
    x = torch.randn(shape, dtype=DOUBLE)
    for actual, want in zip(moments(module, x), dense(module, x), strict=True):
        assert actual.shape == want.shape
        torch.testing.assert_close(actual, want, rtol=1e-11, atol=1e-11)


def test_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "_MEMORY", 1)
    module = nn.Conv2d(1, 2, 2).double()
    x = torch.randn(50, 1, 6, 6, dtype=DOUBLE)
    for actual, want in zip(moments(module, x), dense(module, x), strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-11, atol=1e-11)


def test_no_samples_have_no_moment() -> None:
    second, first = moments(nn.Conv2d(2, 3, 3, padding=1), torch.randn(0, 2, 8, 8))
    assert second.shape == (1, 18, 18)
    assert not bool(second.any())
    assert not bool(first.any())


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_layouts(layout: torch.memory_format, stride: int) -> None:
    x = torch.randn(3, 4, 8, 8, dtype=DOUBLE).contiguous(memory_format=layout)
    for kernel in (1, 3):
        module = nn.Conv2d(4, 2, kernel, stride, padding=kernel // 2).double()
        for images in (x, x[::2, :, 1:7, 2:]):
            for actual, want in zip(moments(module, images), dense(module, images), strict=True):
                torch.testing.assert_close(actual, want, rtol=1e-11, atol=1e-11)


def test_the_first_moment_is_left_out_without_a_bias() -> None:
    module = nn.Conv2d(3, 2, 3, bias=False).double()
    x = draw(2, 3, 6, 6)
    second, first = moments(module, x)
    torch.testing.assert_close(second, dense(module, x)[0])
    assert first.shape == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, groups: int) -> None:
    module = nn.Conv2d(4, 2, 3, padding=1, groups=groups)
    x = (1 + torch.randn(8, 4, 12, 12)).to(dtype)
    for actual, want in zip(moments(module, x), dense(module, x.double()), strict=True):
        assert actual.dtype == torch.float32
        assert float((actual - want).norm() / want.norm()) < 1e-6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 64])
def test_on_cuda(dtype: torch.dtype, groups: int) -> None:
    module = nn.Conv2d(64, 64, 3, padding=1, groups=groups)
    x = torch.randn(16, 64, 12, 12).to(dtype)
    for actual, want in zip(moments(module, x.cuda()), dense(module, x.double()), strict=True):
        assert float((actual.cpu() - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (4, 9, 2, 2), (1, 3, 5, 6), (5, 3, 8), (0, 3, 2)])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16])
def test_channels(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape).to(dtype)
    want = torch.einsum("ncp,ndp->cd", x.double().flatten(2), x.double().flatten(2))
    for images in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
        moment = compute_channel_moment(images)
        assert moment.dtype == (DOUBLE if dtype == DOUBLE else torch.float32)
        torch.testing.assert_close(moment[0].double(), want, rtol=1e-5, atol=1e-5)
    if len(x):
        multiples = [x, 2 * x, -3 * x]
    else:
        multiples = []
    for count in range(1, len(multiples) + 1):
        moment = compute_channel_moments(multiples[:count])
        assert moment.dtype == (DOUBLE if dtype == DOUBLE else torch.float32)
        for one, factor in zip(moment, (1, 4, 9), strict=False):
            torch.testing.assert_close(one.double(), factor * want, rtol=2e-2, atol=1e-5)
            if dtype != torch.bfloat16:
                torch.testing.assert_close(one.double(), factor * want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2**28])
def test_all_inputs_of_a_network(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """Whatever is formed at once: the same moments as one by one, in the order of the uses."""
    monkeypatch.setattr(conv, "_MEMORY", conv._Memory(batch_size))
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
    convolution = nn.Conv2d(7, 4, 1)
    plain = nn.Conv2d(7, 4, 1, bias=False)
    uses += [
        (modules[3], 5 * draw(2, 3, 6, 6)),
        (convolution, draw(2, 7, 2, 3)),
        (plain, draw(2, 7, 2, 3)),
    ]
    uses += [
        (convolution, 2 * draw(2, 7, 2, 3)),
        (convolution, draw(7, 2, 3)),
        (modules[3], draw(3, 6, 6)),
    ]
    uses += [
        (convolution, draw(2, 2, 3, 7).movedim(3, 1)),
        (nn.Conv2d(7, 4, 1, 2), draw(2, 7, 2, 3)),
    ]
    layer = find_layer(modules[0])
    assert layer is not None
    for sharing in (Sharing(), Sharing(reduce=True), Sharing(longest=5)):
        actual = layer.input_moments_of_uses([LayerInput(m, x, None) for m, x in uses], sharing)
        for (module, x), moments_of_use in zip(uses, actual, strict=True):
            want = layer.input_moments(module, x, sharing, None)
            torch.testing.assert_close(moments_of_use.second, want.second)
            assert moments_of_use.positions == want.positions
            if module.bias is not None:
                torch.testing.assert_close(moments_of_use.first, want.first)


@pytest.mark.parametrize("size", [(5, 5), (4, 7), (6, 4)])
def test_a_correlation_has_the_moments_of_patches(size: tuple[int, int]) -> None:
    """Square images and others, of which edges and corners are taken off once."""
    module = nn.Conv2d(3, 2, 3, padding=1, dtype=DOUBLE)
    inputs = [torch.randn(2, 3, *size, dtype=DOUBLE) for _ in range(2)]
    assert all(can_correlate(module, x) for x in inputs)
    moments = correlate_patches(inputs)
    for x, moment in zip(inputs, moments, strict=True):
        patches = unfold_patches(module, x).flatten(0, -2)
        torch.testing.assert_close(moment, patches.mT @ patches, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(3, 2, 3),
        nn.Conv2d(3, 2, 3, padding=1, stride=2),
        nn.Conv2d(3, 2, 3, padding=2, dilation=2),
        nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(3, 3, 3, padding=1, groups=3),
        nn.Conv2d(3, 2, 5, padding=2),
    ],
    ids=str,
)
def test_other_convolutions_are_not_correlated(module: nn.Module) -> None:
    assert not can_correlate(module, torch.randn(2, 3, 6, 6))


def test_uses_of_one_shape_are_correlated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, on a CPU: with and without a bias, as one by one."""
    modules = [nn.Conv2d(3, 2, 3, padding=1, dtype=DOUBLE, bias=bias) for bias in (True, False)]
    uses = [LayerInput(m, torch.randn(2, 3, 5, 6, dtype=DOUBLE), None) for m in modules]
    layer = find_layer(modules[0])
    sharing = Sharing()
    one_by_one = [layer.input_moments(use.module, use.input, sharing, None) for use in uses]
    monkeypatch.setattr(conv, "_find_stacked_method", lambda *_: conv._CORRELATION)
    stacked = layer.input_moments_of_uses(uses, sharing)
    for single, moments in zip(one_by_one, stacked, strict=True):
        torch.testing.assert_close(moments.second, single.second, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(moments.first, single.first, rtol=1e-10, atol=1e-10)
        assert moments.positions == single.positions
