"""Rows of batch normalizations, and the mean and 1/σ that their forward pass keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pullback.maps.layers import find_layer
from pullback.maps.layers.moments import Sharing
from pullback.maps.layers.scale import Scale, compute_unit_moments, form_unit_rows

DOUBLE = torch.float64
SHAPES = {
    "1d": (5, 3),
    "one channel": (2, 1, 3),
    "lines": (5, 3, 4),
    "images": (4, 3, 6, 5),
    "volumes": (3, 2, 3, 2, 4),
}


def norm(shape: tuple[int, ...]) -> nn.Module:
    types = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return types[len(shape) - 2](shape[1]).double()


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(shape, dtype=DOUBLE, generator=g) + 3


def dense(module: nn.Module, x: Tensor, delta: Tensor) -> Tensor:
    """Sample by sample, (N, C, 2), with the normalized input written out."""
    axes = [i for i in range(x.ndim) if i != 1]
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    if not module.training:
        statistics_shape = mean.shape
        mean = module.running_mean.view(statistics_shape)
        var = module.running_var.view(statistics_shape)
    normal = (x - mean) / (var + module.eps).sqrt()  # pyright: ignore
    rows = [(delta * v).flatten(2).sum(2) if x.ndim > 2 else delta * v for v in (normal, 1)]
    return torch.stack(rows, -1)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows(shape: tuple[int, ...], training: bool, last: bool) -> None:
    module = norm(shape).train(training)
    x = draw(shape, 0)
    delta = draw(shape, 1)
    want = dense(module, x, delta)
    if last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    layer = find_layer(module)
    roles = ["weight", "bias"]
    assert isinstance(layer, Scale)
    rows = form_unit_rows([layer.compute_unit_sums(module, x, delta, roles, Sharing())])
    torch.testing.assert_close(rows, want)
    sums = layer.compute_unit_sums(module, x, delta, ["bias", "weight"], Sharing())
    units = compute_unit_moments([sums])[0]
    torch.testing.assert_close(units, torch.einsum("nuk,nul->ukl", want, want).flip(1, 2))


def test_half_precision_is_added_up_in_single() -> None:
    module = nn.BatchNorm2d(3)
    x = draw((8, 3, 9, 9), 0)
    delta = draw((8, 3, 9, 9), 1)
    x = x.bfloat16()
    delta = delta.bfloat16()
    layer = find_layer(module)
    assert isinstance(layer, Scale)
    rows = form_unit_rows(
        [layer.compute_unit_sums(module, x, delta, ["weight", "bias"], Sharing())]
    )
    assert rows.dtype == torch.float32
    want = dense(module, x.double(), delta.double()).float()
    torch.testing.assert_close(rows, want, rtol=1e-4, atol=1e-3)


def test_several_layers_at_once() -> None:
    modules = [norm((4, c, 3, 3)).train(c != 4) for c in (2, 4, 3)]
    uses = [(m, draw((4, m.num_features, 3, 3), i), draw((4, m.num_features, 3, 3), i + 9))  # pyright: ignore
            for i, m in enumerate(modules)]  # fmt: skip
    for roles in (("weight", "bias"), ("bias", "weight"), ("weight",), ("bias",)):
        sums = []
        for module, x, delta in uses:
            layer = find_layer(module)
            assert isinstance(layer, Scale)
            sums.append(layer.compute_unit_sums(module, x, delta, roles, Sharing()))
        assert len({s.join_key for s in sums}) == 1
        order = [("weight", "bias").index(r) for r in roles]
        for (module, x, delta), actual in zip(uses, compute_unit_moments(sums), strict=True):
            want = dense(module, x, delta)[..., order]
            torch.testing.assert_close(actual, torch.einsum("nuk,nul->ukl", want, want))
