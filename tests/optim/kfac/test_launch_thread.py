"""Statistics that a second thread takes during the backward pass, as on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pullback as pb
from pullback.optim.kfac.statistics.launch_thread import LaunchThread
from tests.kfac_options import kfac_of


def _network() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    head = nn.Sequential(nn.Linear(64, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    return nn.Sequential(conv, head).double()


def _optimizer(overlaps: bool, **options: Any) -> tuple[nn.Module, pb.KFAC]:
    model = _network()
    common = {"likelihood": pb.likelihoods.Categorical(), "damping": 1e-2, "lr": 1e-2}
    opt = kfac_of(model, statistics_every=1, invert_every=1, **common, **options)
    opt._capture.overlaps = overlaps
    return model, opt


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (6,), generator=generator)


def _loss(model: nn.Module, seed: int) -> Tensor:
    x, y = _batch(seed)
    return F.cross_entropy(model(x), y)


def _train(overlaps: bool, loss: Callable[[nn.Module, int], Tensor], **options: Any) -> nn.Module:
    model, opt = _optimizer(overlaps, **options)
    for seed in range(4):
        opt.zero_grad()
        loss(model, seed).backward()
        opt.step()
        assert opt.info.took_statistics
    return model


def _same(one: nn.Module, two: nn.Module) -> None:
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [{}, {"draws": 2}, {"fisher": "exact"}, {"ekfac": True}, {"sharing": "reduce", "joint": False}],
)
def test_steps_are_those_of_one_thread(options: dict[str, Any]) -> None:
    _same(_train(True, _loss, **options), _train(False, _loss, **options))


def test_two_passes_in_one_loss() -> None:
    def loss(model: nn.Module, seed: int) -> Tensor:
        return _loss(model, seed) + _loss(model, seed + 9)

    _same(_train(True, loss), _train(False, loss))


def test_an_input_that_is_overwritten_is_noticed() -> None:
    model, opt = _optimizer(True)
    for seed, overwritten in enumerate([False, True, True]):
        opt.zero_grad()
        x, y = _batch(seed)
        # autograd has copies of its own, and does not mind
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            z = model(x)
        if overwritten:
            model[1][0].weight.register_hook(lambda _, x=x: (x.zero_(), None)[1])
        F.cross_entropy(z, y).backward()
        opt.step()
        # then it is measured before the pass goes on
        assert opt.info.took_statistics is (seed != 1)


def test_nothing_is_kept() -> None:
    model, opt = _optimizer(True)
    gc.disable()
    try:
        for seed in range(3):
            _loss(model, seed).backward()
            opt.step()
            assert not any(type(o) is LaunchThread for o in gc.get_objects())
    finally:
        gc.enable()


def test_a_pass_that_fails_leaves_nothing() -> None:
    model, opt = _optimizer(True)
    _loss(model, 0).backward()
    opt.step()

    def stop(_: Tensor) -> None:
        raise ValueError("stop")

    opt.zero_grad()
    handle = model[0][0].weight.register_hook(stop)
    with pytest.raises(ValueError, match="stop"):
        _loss(model, 1).backward()
    handle.remove()
    opt.zero_grad()
    _loss(model, 1).backward()
    assert float(opt._capture.pool.samples) == 6
    opt.step()
    assert opt.info.took_statistics
