"""What makes steps on a slice cheap changes nothing: retractions now and then, recorded graphs."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback import PullbackError
from pullback.symmetry.descent import retractor
from pullback.symmetry.slice_sgd import SliceSGD
from pullback.symmetry.sliced import Sliced
from pullback.symmetry.slices import EqualNorm

from .chain import mlp, relative, scalings


def descend(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 1) -> Tensor:
    """Full-batch steps; returns the outputs after them."""
    generator = torch.Generator().manual_seed(3)
    parameter = next(model.parameters())
    x = torch.randn(16, 3, generator=generator).to(parameter)
    y = torch.randn(16, 2, generator=generator).to(parameter)
    for _ in range(steps):
        opt.zero_grad()
        F.mse_loss(model(x), y).backward()
        opt.step()
    return model(x).detach()


def make(model: nn.Sequential, lr: float = 0.05, **options) -> SliceSGD:
    return SliceSGD(model, lr, symmetry=scalings(model), **options)


# --- every ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("group", "bias"), [("neuron", True), ("neuron", False), ("layer", False)])
def test_between_retractions_steps_are_sgd(
    momentum: float, decay: float, group: str, bias: bool
) -> None:
    model = mlp(3, 8, 6, 5, 2, bias=bias)
    opt = make(model, group=group, every=4, momentum=momentum, weight_decay=decay)
    twin = copy.deepcopy(model)
    sgd = torch.optim.SGD(twin.parameters(), 0.05, momentum=momentum, weight_decay=decay)
    for step in range(1, 4):
        assert torch.equal(descend(model, opt), descend(twin, sgd)), step
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
    # the fourth too, in function; then the parameters are elsewhere on the orbit
    assert relative(descend(model, opt), descend(twin, sgd)) < 1e-13
    distance = [relative(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    assert max(distance) > 1e-7
    if group == "layer":
        assert opt.slice is not None
        assert opt.slice.contains()


@pytest.mark.slow
def test_rarer_retractions_change_a_trajectory_little() -> None:
    """Over a time lr·steps the imbalance grows to O(lr), or with retractions to O(every·lr²).

    That is how far trajectories come apart, where no kink is in the way.
    """
    distance = []
    for lr in (0.02, 0.01):
        ends = []
        for options in ({"sweeps": 8}, {"every": 10}, {"every": 1000}):
            model = mlp(3, 8, 6, 5, 2)
            for i in (1, 3, 5):
                model[i] = nn.Identity()
            ends.append(descend(model, make(model, lr, **options), int(1 / lr)))
        distance.append([relative(end, ends[0]) for end in ends[1:]])
    for before, after in pairwise(distance):
        assert before[1] / after[1] == pytest.approx(2, rel=0.1)
        assert 2.4 < before[0] / after[0] < 4.2
    assert distance[-1][0] < 1e-3


@pytest.mark.parametrize("uniform", [True, False])
def test_without_biases_only_layers_that_decay_differently_are_projected(uniform: bool) -> None:
    model = mlp(3, 6, 5, 2, bias=False)
    if uniform:
        decays = [0.3, 0.3, 0.3]
    else:
        decays = [0.8, 0.0, 0.0]
    layers = [model[0], model[2], model[4]]
    groups = [
        {"params": m.parameters(), "weight_decay": d} for m, d in zip(layers, decays, strict=True)
    ]
    opt = make(model, group="layer", params=groups)
    twin = copy.deepcopy(model)
    slice_ = EqualNorm(scalings(twin), twin)
    descend(model, opt)
    descend(twin, torch.optim.SGD(twin.parameters(), 0.0))  # for its gradient
    g = {n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None}
    for n, decay in zip(g, decays, strict=True):
        g[n] += decay * dict(twin.named_parameters())[n].detach()
    u = slice_.project(g)
    with torch.no_grad():
        for n, p in twin.named_parameters():
            p -= 0.05 * u[n]
    slice_.retract_()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative(p, q) < 1e-13


# --- recorded steps -------------------------------------------------------------------------------


def sliced_adam(model: nn.Sequential, **options) -> Sliced:
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    return Sliced(adam, scalings(model), model=model, **options)


@pytest.mark.parametrize(
    ("build", "options", "period"),
    [
        (make, {}, 2),
        (sliced_adam, {"every": 10}, 20),
        (make, {"every": 3, "sweeps": 1}, 3),
        (sliced_adam, {"sweeps": 1}, 1),
    ],
)
def test_steps_that_differ_are_not_recorded_unless_all_of_them_are(
    build, options: dict[str, int], period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay has no number of the step: it would balance the same layers for ever."""
    monkeypatch.setattr(retractor, "is_recording", lambda _: True)
    model = mlp(3, 8, 6, 5, 2)
    if period == 1:
        descend(model, build(model, **options))
    else:
        with pytest.raises(PullbackError, match=f"captured={period}"):
            descend(model, build(model, **options))
        with pytest.raises(PullbackError, match=f"after {period}"):
            build(model, captured=period + 1, **options)
    descend(model, build(model, captured=3 * period, **options), 2)


def test_layers_may_be_recorded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retractor, "is_recording", lambda _: True)
    model = mlp(3, 8, 6, 5, 2)
    opt = make(model, group="layer")
    descend(model, opt, 3)
    assert opt.slice is not None
    assert opt.slice.contains()


@pytest.mark.parametrize("captured", [0, -2, 1.5, True])
def test_bad_numbers_of_recorded_steps_are_refused(captured: object) -> None:
    with pytest.raises(PullbackError, match="captured"):
        make(mlp(3, 4, 2), captured=captured)
