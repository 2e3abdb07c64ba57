"""Covectors of single positions: what they do not reach is proven all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.optim.kfac import oracle as o


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class Outside(nn.Module):
    """The second output alone uses a weight outside of its layer."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Linear(4, 3), nn.Linear(3, 1), nn.Linear(3, 1)
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        y, z = self.one(h), self.two(h)
        if self.mixed:
            y, z = y + z, z - y
        return torch.cat([y, z + 3 * F.linear(h.square(), self.one.weight)], -1)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_weight_used_outside_its_layer_by_one_output(mixed: bool) -> None:
    model, x = Outside(mixed), torch.randn(6, 4)
    opt = o.optimizer(model, "euclidean", statistics_every=1)
    for _ in range(2):
        opt.zero_grad()
        model(x).square().sum(1).mean().backward()
        opt.step()
    rows = {r.name: r.block.split()[0] for r in opt.coverage()}
    assert rows.pop("one.weight") == "diagonal"
    assert {*rows.values()} == {"kronecker"}
    held = [n for key in opt.curvature.averages for n in key.names]
    assert sorted(held) == sorted(n for n, _ in model.named_parameters())


class Sometimes(nn.Module):
    """A weight that is used in two ways, and in some passes not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        h = self.odd(x) + F.linear(x.square(), self.odd.weight)
        return self.last(torch.tanh(h if whole else h.detach()))


def test_a_reason_stays_where_a_pass_does_not_use_the_parameter() -> None:
    model, x = Sometimes(), torch.randn(6, 3)
    opt = o.optimizer(model, "euclidean", statistics_every=1, damping=0.1)
    for whole in (True, False):
        opt.zero_grad()
        model(x, whole).square().mean().backward()
        opt.step()
        (row,) = [r for r in opt.coverage() if r.name == "odd.weight"]
        assert row.block == "diagonal"
        assert "outside its layer" in row.reason
