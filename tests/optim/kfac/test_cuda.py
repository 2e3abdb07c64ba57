"""On a GPU: the numbers of the CPU, without waiting for it, in graphs, on streams, in float16."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Exact, Invariant

from ..common import assert_close, expect_unchanged
from .common import batch, kfac, net, train, vector

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HERE, reason="no CUDA")]
OPTIONS: list[dict[str, Any]] = [
    {}, {"momentum": 0.0}, {"joint": False}, {"weight_decay": 0.1, "kl_clip": 1e-3},
    {"ekfac": True}, {"damping": Exact(0.1)}, {"damping": Invariant(0.1)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_are_those_of_the_cpu(options: dict[str, Any]) -> None:
    """With a schedule, gradients that are not finite (unnoticed or not), and another stream."""
    ends = []
    broken = (4, 12, 17)
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = net().to(device)
        opt = kfac(model, fisher="exact", statistics_every=6, invert_every=12, **options)
        stream = torch.cuda.Stream()
        for i in range(30):
            if i == 20:
                torch.cuda.synchronize()
            with torch.cuda.stream(stream if i >= 20 else None):
                x, y = (t.to(device) for t in batch(seed=i))
                opt.param_groups[0]["lr"] = 0.05 / (1 + i // 8)
                opt.zero_grad()
                F.cross_entropy(model(x), y).backward()
                if i in broken:
                    model[0].weight.grad[1, 2] = torch.nan
                opt.step()
                if i != 12:
                    assert opt.info.accepted == (i not in broken)
        torch.cuda.synchronize()
        ends.append((vector(model).cpu(), opt.gram().dense().cpu()))
    for one, two in zip(*ends, strict=True):
        assert_close(two, one, 1e-8)


def test_plain_steps_wait_for_nothing_and_passes_may_be_captured() -> None:
    model = net(torch.float32).cuda()
    opt = kfac(model, statistics_every=20, kl_clip=1e-3, weight_decay=0.1)
    x, y = (t.cuda() for t in batch(dtype=torch.float32))

    def gradient() -> list[Tensor | None]:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        return [p.grad for p in model.parameters()]

    try:
        for i in range(12):
            torch.cuda.set_sync_debug_mode("error" if i >= 8 else "default")
            opt.param_groups[0]["lr"] = 0.01 / (1 + i)
            gradient()
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opt.info.accepted
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient()
    for i in range(12, 24):
        before = vector(model)
        due = opt.statistics_due
        assert due == (i == 20)
        if due:
            gradient()
        else:
            graph.replay()
            for p, g in zip(model.parameters(), captured, strict=True):
                p.grad = g
        opt.step()
        assert opt.info.took_statistics == due
        assert not torch.equal(before, vector(model))


def test_another_device_after_construction() -> None:
    model = net()
    opt = kfac(model, damping=Invariant(0.1))
    train(opt, model, 2)
    model.cuda()
    train(opt, lambda x: model(x.cuda()).cpu(), 5, start=2)
    assert opt.gram().dense().is_cuda
    model.cpu()
    train(opt, model, 3, start=7)
    assert opt.info.accepted


def test_float16_with_a_scaler() -> None:
    model = nn.Sequential(net(torch.float32), nn.LayerNorm(4), nn.Linear(4, 4)).cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30)  # the first steps overflow
    opt = kfac(model, grad_scaler=scaler)
    values = []
    x, y = (t.cuda() for t in batch(16, dtype=torch.float32))
    for _ in range(60):
        opt.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        values.append(float(loss.detach()))
    assert values[-1] < 0.9 * values[0]
    assert all(row.block.startswith(("kronecker", "units")) for row in opt.coverage())


@pytest.mark.parametrize("rule", ["eigenbasis", "spectral", "two-sided"])
def test_rules_take_the_steps_of_the_cpu(rule: str) -> None:
    """In float64, also past gradients that are not finite."""
    ends = []
    broken = (4, 12, 17)
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = net().to(device)
        opt = pb.KFAC(model, 0.01, rule=rule, statistics_every=6, invert_every=12, weight_decay=0.1)
        for i in range(30):
            x, y = (t.to(device) for t in batch(seed=i))
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if i in broken:
                model[0].weight.grad[1, 2] = torch.nan
            opt.step()
            assert opt.info.accepted == (i not in broken)
        ends.append(vector(model).cpu())
    assert_close(ends[1], ends[0], 1e-6)


@pytest.mark.parametrize("rule", ["eigenbasis", "spectral", "two-sided"])
@pytest.mark.parametrize("finished_steps", [7, 10])  # a plain step, and one with statistics
def test_a_broken_gradient_changes_nothing_of_a_rule(rule: str, finished_steps: int) -> None:
    model = net(torch.float32).cuda()
    opt = pb.KFAC(model, 0.01, rule=rule, statistics_every=5, invert_every=20, weight_decay=0.1)
    train(opt, lambda x: model(x.cuda()).cpu(), finished_steps, dtype=torch.float32)
    x, y = (t.cuda() for t in batch(dtype=torch.float32))
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model[2].bias.grad[1] = torch.inf
    with expect_unchanged(model, opt):
        opt.step()
    assert not opt.info.accepted
    assert "not finite" in opt.info.reason


@pytest.mark.parametrize("rule", ["eigenbasis", "spectral", "two-sided"])
def test_rules_in_single_precision_are_close_to_those_in_double(rule: str) -> None:
    """Bases, roots and polar factors are in float16 there."""
    moves = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        torch.manual_seed(0)
        model = net().to(device, dtype)
        before = vector(model).cpu().double()
        opt = pb.KFAC(model, 0.01, rule=rule, statistics_every=1, invert_every=1)
        for i in range(5):
            x, y = batch(64, seed=i)
            opt.zero_grad()
            F.cross_entropy(model(x.to(device, dtype)), y.to(device)).backward()
            opt.step()
        moves.append(vector(model).cpu().double() - before)
    assert_close(moves[1], moves[0], 0.1)
