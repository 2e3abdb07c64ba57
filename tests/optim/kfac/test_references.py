"""Invariant damping: what gains and shifts add, whose averages serve, and what is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Adaptive, Invariant

from ..common import refused
from .common import DOUBLE, vector


def net(width: int = 6, gain: float = 1.0) -> Any:
    """Normalized twice; gain and shift over `gain` times the next weight's multiple of it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4),
        nn.BatchNorm1d(4), nn.Linear(4, 3),
    ).to(DOUBLE)  # fmt: skip
    last: Any = model[-2:]
    with torch.no_grad():
        last[0].bias.normal_()
        for p in last[0].parameters():
            p.div_(gain)
        last[1].weight.mul_(gain)
    for layer in (model[0], model[3]):  # singular below a normalization
        layer.requires_grad_(False)
    return model


def data(seed: int = 1, samples: int = 24) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=g, dtype=DOUBLE)
    return x, torch.randn(samples, 3, generator=g, dtype=DOUBLE)


def trained(model: Any, damping: Any, steps: int = 1, **options: Any) -> pb.KFAC:
    chosen = {"momentum": 0.0, "statistics_every": 1, "invert_every": 1, "lr": 0.1, **options}
    opt = pb.KFAC(model, fisher="exact", damping=damping, **chosen)
    x, y = data()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (model(x) - y).square().sum(1).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)
    return opt


def average(width: int = 6, **options: Any) -> Any:
    """Of a few other samples, which are seen otherwise."""
    model, (x, y) = net(width), data(2, 8)
    opt = pb.KFAC(model, lr=0.0, fisher="exact", **options)
    (0.5 * (model(x) - y).square().sum(1).mean()).backward()
    opt.step()
    return opt.average()


@pytest.mark.parametrize("value", [0.1, 1e-3])
@pytest.mark.parametrize("scale", [3.0, 100.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_normalized_twins_stay_together(value: float, scale: float, adaptive: bool) -> None:
    seen = []
    for gain in (1.0, scale):
        model, damping = net(gain=gain), Invariant(value)
        trained(model, Adaptive(damping) if adaptive else damping, steps=5)
        seen.append(model(data()[0]).detach())
    start = net()(data()[0]).detach()
    assert (seen[1] - seen[0]).norm() <= 1e-9 * (seen[0] - start).norm()
    tikhonov = []
    for gain in (1.0, scale):
        model = net(gain=gain)
        trained(model, value, steps=5)
        tikhonov.append(model(data()[0]).detach())
    assert (tikhonov[1] - tikhonov[0]).norm() > 1e-4 * (seen[0] - start).norm()


def dense(model: Any, x: Tensor, names: tuple[str, str]) -> Tensor:
    """Σ over outputs of the mean of gain's and shift's squared sampled gradients, (U, 2, 2).

    With one output per sample of ½‖z‖² the Fisher of a unit is mean over samples of JᵀJ, where the
    batch is seen as a constant by the normalization's statistics.
    """
    layer: Any = model.get_submodule(names[0].rpartition(".")[0])
    caught: list[Any] = []
    handle = layer.register_forward_hook(lambda m, args, out: caught.append((args[0], out)))
    z = model(x)
    handle.remove()
    inner, out = caught[0]
    mean, var = inner.mean(0), inner.var(0, unbiased=False)
    normal = ((inner - mean) / (var + layer.eps).sqrt()).detach()
    total = torch.zeros(out.shape[1], 2, 2, dtype=DOUBLE)
    for n in range(len(z)):
        for k in range(z.shape[1]):
            (delta,) = torch.autograd.grad(z[n, k], out, retain_graph=True)
            rows = torch.stack([(delta * normal).sum(0), delta.sum(0)], 1)  # (U, 2)
            total += rows[:, :, None] * rows[:, None] / len(z)
    return total


@pytest.mark.parametrize("given", [False, True])
def test_gains_and_shifts_are_damped_by_their_own_moments(given: bool) -> None:
    """(B + λB_ref)⁻¹g with matrices from autograd."""
    model, names = net(), ("4.weight", "4.bias")
    own = dense(model, data()[0], names)
    other = dense(net(), data(2, 8)[0], names) if given else own
    before = [model.get_parameter(n).detach().clone() for n in names]
    trained(model, Invariant(0.3, average() if given else None))
    moved = torch.stack([b - model.get_parameter(n) for n, b in zip(names, before, strict=True)], 1)
    g = torch.stack([model.get_parameter(n).grad for n in names], 1)
    want = 0.1 * torch.linalg.solve(own + 0.3 * other, g)
    torch.testing.assert_close(moved.detach(), want, rtol=1e-9, atol=1e-12)


def test_units_that_never_matter_are_left_out_and_named() -> None:
    model = net()
    with torch.no_grad():
        model[5].weight[:, 1] = 0  # nothing follows from unit 1 of the last normalization
        model[4].weight[1] = 2.0
    opt = trained(model, Invariant(0.1))
    assert "rank 6 of 8" in opt.info.notes["4.weight, 4.bias"]
    assert float(model[4].weight[1].detach()) == 2.0


def test_an_adaptive_damping_uses_the_reference_within() -> None:
    reference = average()
    moves = []
    for damping in (Invariant(0.5, reference), Adaptive(Invariant(0.5, reference)), Invariant(0.5)):
        model = net()
        before = vector(model)
        trained(model, damping)
        moves.append(vector(model) - before)
    assert torch.equal(moves[0], moves[1])
    assert (moves[2] - moves[0]).norm() > 0.1 * moves[0].norm()


def test_a_block_without_reference_is_damped_by_its_own_average_and_named() -> None:
    """Taken with joint=False, weights and biases are blocks of their own there."""
    one, two = net(), net()
    opt = trained(one, Invariant(0.5, average(joint=False)))
    trained(two, Invariant(0.5))
    assert torch.equal(vector(one), vector(two))
    for names in ("4.weight, 4.bias", "5.weight, 5.bias"):
        assert "lacks this block" in opt.info.notes[names]
    assert "lacks this block" in str(opt.coverage())
    known = trained(net(), Invariant(0.5, average()))
    assert not any("lacks" in note for note in known.info.notes.values())


def test_a_reference_follows_the_parameters_dtype() -> None:
    model = net().float()
    opt = pb.KFAC(model, lr=0.1, damping=Invariant(0.5, average()))
    model(data()[0].float()).square().sum(1).mean().backward()
    opt.step()
    assert opt.info.accepted
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("given", [3, {}, {"x": 1}, [1]])
def test_what_is_no_reference(given: Any) -> None:
    with refused("reference is not usable", "got", "KFAC.average()"):
        Invariant(0.1, given)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_reference_of_another_width(adaptive: bool) -> None:
    model, damping = net(), Invariant(0.1, average(width=7))
    opt = pb.KFAC(model, lr=0.1, damping=Adaptive(damping) if adaptive else damping)
    x, y = data()
    before, saved = vector(model), copy.deepcopy(opt.state_dict()["state"])

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with refused("reference does not fit", "7", "KFAC.average()"):
        opt.step(closure)
    assert torch.equal(vector(model), before)
    assert opt.state_dict()["state"]["pullback"]["taken"] == saved["pullback"]["taken"] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"factor": 0.5}, {"factor": float("nan")}, {"factor": "much"}, {"low": 2.0}, {"low": -1.0},
        {"smallest": 10.0, "largest": 1.0}, {"largest": float("inf")}, {"inner": Adaptive(1.0)},
    ],
)  # fmt: skip
def test_adaptive_dampings_that_could_not_adapt(options: dict[str, Any]) -> None:
    with refused("Adaptive damping is not usable", "", ""):
        Adaptive(**options)
