"""Gradients and directions in one piece of memory: layouts, param groups, and giving it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pullback.optim.kfac.blocks.layout import together
from pullback.optim.kfac.stepping import steady
from pullback.optim.kfac.stepping.rooms import Plan, Rooms

from .test_steady import OPTIONS, batch, built, cuda, near, net, recorder, reference, train

__all__ = ["recorder"]


def grouped(model: Any) -> list[dict[str, Any]]:
    """Vectors by themselves, as where they are not to decay."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim < 2], "lr": 0.02, "weight_decay": 0.0},
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
    ]


@pytest.mark.parametrize("options", [*OPTIONS, {"kl_clip": 1e-4, "momentum": 0.0}], ids=str)
def test_large_models_give_the_memory_back(recorder, monkeypatch, options) -> None:
    monkeypatch.setattr(steady, "_LARGEST", 0)
    model = net().to(memory_format=torch.channels_last)
    opt = built(model, **options)
    assert near(train(model, opt, 20), reference(20, **options))
    program = opt._steady._program
    assert program is not None
    assert not recorder.recorded
    for rooms in (program._given, program._found):
        assert not any(t.untyped_storage().nbytes() for t in rooms.flat.values())


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kl_clip", [None, 1e-4])
@pytest.mark.parametrize("without", [("first.bias",), ("first.bias", "second.bias", "conv.weight")])
def test_param_groups_and_missing_gradients(recorder, large, kl_clip, without) -> None:
    """A partner without a gradient counts as zero, at every step."""
    results = []
    for on in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steady, "usable", lambda params, on=on: on)
            if large:
                patch.setattr(steady, "_LARGEST", 0)
            model = net()
            opt = built(model, params=grouped(model), kl_clip=kl_clip, statistics_every=9)
            train(model, opt, 1)
            for i in range(1, 9):
                x, y = batch(i, model.gain)
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for name in without:
                    model.get_parameter(name).grad = None
                opt.step()
            results.append(torch.cat([t.detach().flatten() for t in model.parameters()]))
    assert near(*results)


def plainly(
    params: list[Tensor], deltas: list[Tensor], buffers: list[Tensor], **options: Any
) -> None:
    """The fused kernel's work, which torch's CPU version does not do right in bfloat16."""
    if options["found_inf"] == 1:
        return
    for p, d, m in zip(params, deltas, buffers, strict=True):
        assert d.dtype == p.dtype
        m.mul_(options["momentum"]).add_(d / options["grad_scale"].to(d.dtype))
        p.sub_(options["lr"].to(p.dtype) * m)


def test_half_precision_parameters(recorder, monkeypatch) -> None:
    monkeypatch.setattr(torch, "_fused_sgd_", plainly)
    results = []
    for on in (False, True):
        monkeypatch.setattr(steady, "usable", lambda params, on=on: on)
        model = net(torch.bfloat16)
        results.append(train(model, built(model, kl_clip=1e-3), 8).float())
    assert torch.allclose(*results, rtol=0.05, atol=0.02)


def test_as_few_inner_products_as_possible() -> None:
    model = net()
    opt = built(model, params=grouped(model))
    train(model, opt, 1)
    like = dict(model.named_parameters())
    names = [[opt._names[id(p)] for p in g["params"]] for g in opt.param_groups]
    plan = Plan(opt.curvature.groups, like, names)
    assert [share for _, share, *_ in plan.spans()] == [0, 1]
    given, found = Rooms(plan, torch.device("cpu")), Rooms(plan, torch.device("cpu"))
    want = [0.0, 0.0]
    for share, own in enumerate(names):
        for n in own:
            x, y = torch.randn_like(like[n]), torch.randn_like(like[n])
            given.views[n].copy_(x)
            found.views[n].copy_(y)
            want[share] += float((x * y).sum())
    for dtype, share, a, b in plan.spans():
        got = torch.dot(given.flat[dtype][a:b], found.flat[dtype][a:b])
        torch.testing.assert_close(float(got), want[share])
    assert all(s.start % 64 == 0 for s in plan.slots.values() if len(s.shape) > 2)


def test_copies_at_even_distances_are_one() -> None:
    new, held = torch.randn(9, 6, 6), torch.zeros(7, 5, 5)
    order = [0, 2, 4, 5, 6, 1, 8]  # by twos, by ones, back, and on

    def pairs(to: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(to[i : i + 1], new[j : j + 1, :5, :5]) for i, j in enumerate(order)]

    fewer = together(pairs(held))
    assert len(fewer) < len(order)
    for to, source in fewer:
        to.copy_(source)
    assert torch.equal(held, new[order][:, :5, :5])
    alone = [(torch.zeros(2, 3), torch.randn(2, 3)) for _ in range(3)]
    assert len(together(alone)) == 3


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_giving_memory_back_changes_no_bits(monkeypatch, options) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    results = []
    for largest in (0, 2**26):
        with monkeypatch.context() as patch:
            patch.setattr(steady, "_LARGEST", largest)
            model = net(torch.float32).cuda().to(memory_format=torch.channels_last)
            results.append(train(model, built(model, **options), 20))
    assert torch.equal(*results)
