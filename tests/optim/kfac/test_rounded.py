"""Normalizations in half precision, whose gradients torch rounds: proven by themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.testing import assert_close

from .common import kfac

NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8),
    "batch": lambda: Turned(nn.BatchNorm1d(8)),
    "group": lambda: Turned(nn.GroupNorm(2, 8)),
}


class Turned(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


class Net(nn.Module):
    def __init__(self, norm: nn.Module, more: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.head, self.more = nn.Linear(5, 8), norm, nn.Linear(8, 3), more

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x)))
        h = h + self.norm.bias if self.more else h
        return self.head(h.mean(1))


def step(model: nn.Module, opt: Any, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 48, 5, generator=g), torch.randint(0, 3, (64,), generator=g)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    if opt is not None:
        opt.step()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("seed", range(3))
def test_units_under_autocast(norm: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = Net(NORMS[norm]())
    opt = kfac(model, fisher="exact")
    step(model, opt, seed)
    inner = [r for r in opt.coverage() if r.name.startswith("norm.")]
    assert inner
    assert all(r.block.startswith("units") for r in inner)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", NORMS)
def test_units_of_halves(norm: str, dtype: torch.dtype) -> None:
    """Parameters and buffers in half precision too."""
    torch.manual_seed(0)
    model = Net(NORMS[norm]()).to(dtype)
    opt = kfac(model)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 48, 5, generator=g), torch.randint(0, 3, (64,), generator=g)
    F.cross_entropy(model(x.to(dtype)).float(), y).backward()
    opt.step()
    inner = [r for r in opt.coverage() if r.name.startswith("norm.")]
    assert all(r.block.startswith("units") for r in inner)
    assert all(b.dtype == dtype for b in model.buffers() if b.is_floating_point())


def test_the_blocks_are_those_of_float32() -> None:
    """To what half precision gives: without it, the same network."""
    torch.manual_seed(0)
    model = Net(nn.LayerNorm(8))
    found = []
    for half in (True, False):
        g = torch.Generator().manual_seed(0)
        x, y = torch.randn(64, 48, 5, generator=g), torch.randint(0, 3, (64,), generator=g)
        with kfac(model, fisher="exact", lr=0.0) as opt:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            (key,) = (k for k in opt.curvature.averages if k.names[0] == "norm.weight")
            found.append(opt.curvature.block(key).dense())
    assert_close(found[0], found[1], 0.05, "gain and shift")


def test_a_shift_that_is_used_elsewhere_is_noticed() -> None:
    torch.manual_seed(0)
    model = Net(nn.LayerNorm(8), more=True)
    opt = kfac(model)
    step(model, opt)
    rows = {r.name: r for r in opt.coverage()}
    assert rows["norm.bias"].block == "diagonal"
    assert "outside its layer" in rows["norm.bias"].reason
    assert rows["norm.weight"].block.startswith("units")


def test_a_layer_that_was_changed_is_noticed() -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    own = norm.forward
    norm.forward = lambda input: 2 * own(input)
    model = Net(norm)
    opt = kfac(model)
    step(model, opt)
    rows = {r.name: r for r in opt.coverage()}
    assert {rows[n].block for n in ("norm.weight", "norm.bias")} == {"diagonal"}


def test_buffers_stay_what_the_training_made_of_them() -> None:
    torch.manual_seed(0)
    model = Net(NORMS["batch"]())
    other = copy.deepcopy(model)
    parameters = list(model.parameters())
    step(model, kfac(model, lr=0.0))
    step(other, None)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    for (name, got), want in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(got, want), name
