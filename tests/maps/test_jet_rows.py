"""Rows of small layers of jets, against the factored blocks and the Jacobian."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from pullback.maps import OperatorMap, Scheme
from pullback.maps import operator as module
from pullback.maps.layers import AffineBlock, RowsBlock
from tests.pairs import each_once

N = 6
D = 2
Q = torch.linspace(0.2, 1, N).double()
SCHEME = Scheme.of([(0, 1)], laplacian=(0, 1))


def made(sites: int, widths: tuple[int, ...]) -> tuple[OperatorMap, dict[str, Tensor]]:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for a, b in zip((D, *widths), (*widths, 2), strict=True):
        layers += [nn.Linear(a, b), nn.Tanh()]
    net = nn.Sequential(*layers[:-1]).double()
    x = torch.rand(sites, N, D).double()

    def operator(channels, params: dict[str, Tensor]) -> Tensor:
        """Two residuals; the second has no derivatives, so that some channels stay silent."""
        first = channels[-1, 0, :, 0] + channels[3, 0, :, 1] * channels[0, -1, :, 0]
        return torch.stack([first, channels[0, 0, :, 1] - channels[0, -1, :, 1] ** 2], -1)

    def apply(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, params, (x,))

    return OperatorMap(apply, x, SCHEME, operator, Q), dict(net.named_parameters())


@pytest.mark.parametrize(
    ("widths", "sites"), each_once([(), (1,), (3,), (20,), (3, 20), (20, 3)], [1, 2])
)
def test_rows_are_those_of_the_jacobian(sites: int, widths: tuple[int, ...]) -> None:
    map, params = made(sites, widths)
    fixed = {n: p.detach() for n, p in params.items()}
    j = torch.cat([x.reshape(2 * N, -1) for x in jacrev(map)(fixed).values()], 1)
    torch.testing.assert_close(map.linearize(params).rows(), j, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("sites", [1, 2])
@pytest.mark.parametrize("covectors", [1, 3])
def test_small_and_large_alike(sites: int, covectors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    map, params = made(sites, (1, 20, 20))
    u = torch.randn(covectors, N, 2).double()
    small = map.linearize(params).pullback(u)
    monkeypatch.setattr(module, "_SMALL", 0)
    large = map.linearize(params).pullback(u)
    types = {type(b) for b in small.blocks.values()}, {type(b) for b in large.blocks.values()}
    assert types == ({RowsBlock}, {AffineBlock})
    v = torch.randn(small.space.size).double()
    c = torch.randn(N, covectors).double()
    for actual, want in (
        (small.rows(), large.rows()),
        (small.kernel(), large.kernel()),
        (small.kernel(large), large.kernel()),
        (small.project(v), large.project(v)),
        (small.lift(c), large.lift(c)),
        (small.narrow(1, 4).rows(), large.narrow(1, 4).rows()),
        (small.narrow(1, 4).lift(c[1:4]), large.narrow(1, 4).lift(c[1:4])),
    ):
        torch.testing.assert_close(actual, want, rtol=1e-11, atol=1e-12)
