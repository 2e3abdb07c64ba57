"""The two sides of a transposed convolution; its block stands in the table of all layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.maps import Call, ModuleMap, identity_covectors
from pullback.maps.layers import Use, find_layer
from pullback.maps.layers.affine import AffineBlock
from pullback.maps.layers.gram import Route
from pullback.testing import assert_close, jacobian

CASES = {
    "1d": (lambda: nn.ConvTranspose1d(2, 3, 3), (4, 2, 5)),
    "stride and padding": (lambda: nn.ConvTranspose1d(2, 3, 4, stride=2, padding=1), (4, 2, 5)),
    "output padding": (
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=3, padding=1, output_padding=2),
        (2, 2, 4),
    ),
    "output padding beyond any input": (
        lambda: nn.ConvTranspose1d(2, 3, 2, dilation=4, output_padding=3),
        (2, 2, 4),
    ),
    "gaps": (lambda: nn.ConvTranspose1d(2, 3, 2, stride=4, output_padding=1), (2, 2, 4)),
    "groups": (
        lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(1, 2), groups=2, dilation=(2, 1)),
        (3, 4, 3, 2),
    ),
    "3d": (
        lambda: nn.ConvTranspose3d(2, 2, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 1), groups=2),
        (2, 2, 2, 3, 3),
    ),
    "unbatched": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 3, 4)),
}


class Decoder(nn.Module):
    """One layer used twice, with two output sizes, behind a layer that folds its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(2, 2, 3, stride=2, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        return torch.sin(self.up(x, output_size=[16])).mean(1)[:, ::3]


@pytest.mark.parametrize("route", ["hadamard", "materialized"])
@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_one_layer_twice(frozen: str | None, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AffineBlock, "_choose_route", lambda self, other: Route(route))
    torch.manual_seed(0)
    model = Decoder().double()
    if frozen is not None:
        getattr(model.up, frozen).requires_grad_(False)
    free = {n: p for n, p in model.named_parameters() if p.requires_grad}
    x = torch.randn(4, 2, 3).double()
    j = jacobian(model(x), list(free.values()))
    linear = ModuleMap(model, Call.of(x)).linearize(free)
    pulled = linear.pullback(identity_covectors(linear.value))
    assert {c.reason for c in pulled.coverage} == {"known layer"}
    assert_close(pulled.rows(), j, 1e-12, "rows")
    n, r = pulled.shape
    assert_close(pulled.kernel(budget=2**30), j @ j.T, 1e-12, "kernel")
    piece = pulled.narrow(1, n)
    assert_close(pulled.kernel(piece, budget=2**30), j @ j[r:].T, 1e-12, "kernel of two parts")
    v = torch.randn(j.shape[1]).double()
    c = torch.randn(n, r).double()
    assert_close(pulled.project(v).flatten(), j @ v, 1e-12, "project")
    assert_close(pulled.lift(c), j.T @ c.flatten(), 1e-12, "lift")


@pytest.mark.parametrize("is_wide", [False, True])
def test_the_reported_route_is_the_one_taken(is_wide: bool) -> None:
    torch.manual_seed(0)
    if is_wide:
        module = nn.ConvTranspose1d(200, 100, 3, stride=2)
    else:
        module = nn.ConvTranspose1d(1, 2, 3)
    x = torch.randn(2, module.in_channels, 2 if is_wide else 40)
    delta = torch.randn_like(module(x))[:, None]
    names = {"weight": "weight", "bias": "bias"}
    block = find_layer(module).block(names, [Use(module, x, delta, 2)] * 2)
    assert block.route == ("hadamard" if is_wide else "materialized")


def test_the_natural_gradient_knows_the_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.Unflatten(1, (4, 2)), nn.Tanh(), nn.ConvTranspose1d(4, 2, 2, stride=2)
    ).double()
    x = torch.randn(5, 3).double()
    y = torch.randn(5, 2, 4).double()
    opt = pb.NaturalGradient(
        model, metric=pb.metrics.Euclidean(), solver=pb.solvers.Cholesky(damping=1e-2)
    )

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    info = opt.step(closure)
    assert {c.name: c.reason for c in info.coverage}["3.weight"] == "known layer"
    assert {c.reason for c in info.coverage} == {"known layer"}
