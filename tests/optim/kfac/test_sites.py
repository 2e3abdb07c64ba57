"""What is found once for a model's layers is found again where the model has changed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac.statistics import measure


class Tied(nn.Module):
    """A weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def optimizer(model: nn.Module) -> pb.KFAC:
    return pb.KFAC(model, 0.0, fisher="exact", ema=0.0, statistics_every=1, invert_every=10**6)


def take(model: nn.Module, opt: pb.KFAC) -> None:
    x = torch.linspace(-1, 1, 20).double().view(5, 4)
    opt.zero_grad()
    (0.5 * model(x).square().sum() / 5).backward()
    opt.step()


def averages(opt: pb.KFAC) -> dict[str, Tensor]:
    held = opt.curvature.averages
    return {f"{k.names} {n}": v for k, a in held.items() for n, v in a.value.items()}


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many passes were proven so far."""
    count = [0]

    class Counted(measure.Proof):
        def __init__(self) -> None:
            super().__init__()
            count[0] += 1

    monkeypatch.setattr(measure, "Proof", Counted)
    return lambda: count[0]


def test_frozen_and_thawed_in_turn(proofs: Callable[[], int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    opt = optimizer(model)
    for step in range(6):
        model[0].requires_grad_(step % 2 == 0)
        take(model, opt)
    assert proofs() == 2


def test_untied_weight() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    opt = optimizer(model)
    for _ in range(3):
        take(model, opt)
    model.last.weight = nn.Parameter(model.first.weight.detach().clone())  # of no param group
    take(model, opt)
    fresh = pb.KFAC(
        model, 0.0, fisher="exact", ema=0.0, params=[model.first.weight], statistics_every=1
    )
    take(model, fresh)
    want, got = averages(fresh), averages(opt)
    assert want.keys() == got.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)


def test_exchanged_layer_of_another_kind(proofs: Callable[[], int]) -> None:
    torch.manual_seed(0)
    old = nn.LayerNorm(4)
    model = nn.Sequential(nn.Linear(4, 4), old, nn.Linear(4, 2)).double()
    opt = optimizer(model)
    for _ in range(2):
        take(model, opt)
    assert proofs() == 1
    norm = nn.GroupNorm(2, 4).double()
    norm.weight, norm.bias = old.weight, old.bias
    model[1] = norm
    for _ in range(2):
        take(model, opt)
    assert proofs() == 2


def test_hooks_are_gone_and_own_no_model() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    opt = optimizer(model)
    take(model, opt)
    assert not any(m._forward_hooks or m._forward_hooks_with_kwargs for m in model)
    layer, sites = weakref.ref(model[0]), opt._gatherer._holdings._sites
    assert sites is not None
    hooks = [hook for _, hook in sites.hooks]
    opt.close()
    del opt, model, sites
    gc.collect()
    assert len(hooks) == 2
    assert layer() is None
