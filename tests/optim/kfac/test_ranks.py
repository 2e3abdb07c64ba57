"""Gradients of large layers, preconditioned from their factors."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pullback as pb
from pullback.optim.kfac.blocks import ranks


def trained(model: nn.Module, monkeypatch, gain: float, *, change=None, calls: int = 1):
    monkeypatch.setattr(ranks, "_GAIN", gain)
    monkeypatch.setattr(ranks, "_SMALLEST", 64)
    model = copy.deepcopy(model)
    torch.manual_seed(1)
    x, y = torch.randn(6, 20, dtype=torch.float64), torch.randint(0, 3, (6,))
    x = x.to(next(model.parameters()).dtype)
    opt = pb.KFAC(model, lr=0.1, likelihood=pb.likelihoods.Categorical(), statistics_every=2)
    used = 0
    for _ in range(4):
        opt.zero_grad()
        for part, target in zip(x.chunk(calls), y.chunk(calls), strict=True):
            (F.cross_entropy(model(part), target) / calls).backward()
        if change is not None:
            change(model)
        opt.step()
        used += opt.info.low_rank
    return torch.cat([p.detach().flatten() for p in model.parameters()]), used


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 25, bias=False), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(25, 3)).double()


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def decayed(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.add_(p.detach(), alpha=0.1)


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("change", [None, clipped], ids=["plain", "clipped"])
def test_the_step_is_that_of_the_gradient(model, monkeypatch, change, calls: int) -> None:
    want, none = trained(model, monkeypatch, 1e9, change=change, calls=calls)
    got, used = trained(model, monkeypatch, 0.5, change=change, calls=calls)
    assert none == 0
    assert used >= 4
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-12)


def test_a_changed_gradient_goes_the_usual_way(model, monkeypatch) -> None:
    want, _ = trained(model, monkeypatch, 1e9, change=decayed)
    got, used = trained(model, monkeypatch, 0.5, change=decayed)
    assert used == 0
    assert torch.equal(got, want)


def regularized(model: nn.Module, strength: float) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.add_(p.detach(), alpha=strength)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weak_regularizer_is_not_lost(model, monkeypatch, dtype: torch.dtype) -> None:
    """What it adds to the gradient is small, and most of it lies where F̂⁻¹ is large."""
    strength = 2e3 * torch.finfo(dtype).eps
    model = model.to(dtype)
    change = partial(regularized, strength=strength)
    want, _ = trained(model, monkeypatch, 1e9, change=change)
    got, used = trained(model, monkeypatch, 0.5, change=change)
    assert used == 0
    assert torch.equal(got, want)
    plain, used = trained(model, monkeypatch, 0.5)
    assert used >= 4
    assert not torch.equal(plain, want)


def test_gradients_of_16_bits_go_the_usual_way(model, monkeypatch) -> None:
    got, used = trained(model.to(torch.bfloat16), monkeypatch, 0.5)
    assert used == 0
    assert torch.isfinite(got).all()


def test_hooks_go_with_the_optimizer(model, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "_SMALLEST", 64)
    with pb.KFAC(model, lr=0.1):
        assert any(m._forward_hooks for m in model)
        twin = copy.deepcopy(model)
        twin(torch.randn(2, 20, dtype=torch.float64)).sum().backward()
    assert not any(m._forward_hooks for m in model)
