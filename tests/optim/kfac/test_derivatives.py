"""Losses on derivatives of the output in a plain loop: what they are told."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import Tensor, nn

import pullback as pb

from .common import kfac, net


def slope(model: nn.Module, x: Tensor, graph: bool = True) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=graph)[0]


def points() -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_loss_of_derivatives_alone_names_the_objective() -> None:
    model = net()
    opt = kfac(model, metric=pb.metrics.Euclidean())
    before = [p.detach().clone() for p in model.parameters()]
    slope(model, points()).square().mean().backward()
    with pytest.raises(pb.PullbackError, match=r"step\(objective="):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("one", [False, True])
def test_derivatives_beside_the_output_warn(one: bool) -> None:
    """In a call of their own, or by way of the same output."""
    model, x = net(), points()
    opt = kfac(model, metric=pb.metrics.Euclidean())
    if one:
        x.requires_grad_()
        z = model(x)
        g = torch.autograd.grad(z.sum(), x, create_graph=True)[0]
    else:
        z, g = model(x), slope(model, x)
    (z.square().mean() + g.square().mean()).backward()
    with pytest.warns(RuntimeWarning, match=r"step\(objective="):
        opt.step()


def test_gradients_by_inputs_that_no_loss_uses_do_not_warn() -> None:
    model, x = net(), points()
    opt = kfac(model, metric=pb.metrics.Euclidean(), statistics_every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            opt.zero_grad()
            attacked = x + 0.1 * slope(model, x, graph=False).sign()
            model(attacked).square().mean().backward()
            opt.step()
    assert opt.info.taken


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives_that_are_only_looked_at_do_not_warn(order: int) -> None:
    """A saliency map with a graph, which the loss does not go through; then one that it does."""
    model, x = net(), points().requires_grad_()
    opt = kfac(model, metric=pb.metrics.Euclidean(), statistics_every=1)
    for used in (False, True):
        opt.zero_grad()
        z = model(x)
        shown = z
        for _ in range(order):
            shown = torch.autograd.grad(shown.sum(), x, create_graph=True)[0]
        loss = z.square().mean() + (shown.square().mean() if used else 0)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loss.backward()
            opt.step()
        assert opt.info.taken
        assert ["step(objective=" in str(w.message) for w in found] == [True] * used


class Kept:
    """A tensor that a graph keeps."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_a_graph_is_not_held_by_who_follows_it() -> None:
    left = []
    for watched in (False, True):
        held: weakref.WeakSet[Kept] = weakref.WeakSet()

        def pack(value: Tensor, held: weakref.WeakSet[Kept] = held) -> Kept:
            held.add(kept := Kept(value))
            return kept

        model, x = net(), points().requires_grad_()
        opt = kfac(model, metric=pb.metrics.Euclidean()) if watched else None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.value):
            shown = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        most = len(held)
        gc.disable()
        del shown
        left.append((most, len(held)))
        gc.enable()
        del opt
    assert left[0] == left[1]
    assert left[0][1] < left[0][0]
