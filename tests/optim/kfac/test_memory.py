"""What K-FAC holds while it refreshes its states, and what it copies in a plain step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pullback.grams.kronecker.packed_matrix import get_entries
from pullback.optim.kfac.rules import Natural
from pullback.optim.kfac.state import KFACState

from .common import batch, kfac, net, train


def test_statistics_are_gone_when_states_are_refreshed(monkeypatch: Any) -> None:
    """Their memory serves the refresh, which needs several copies of all factors."""
    means_of_step: list[weakref.ref[Any]] = []
    alive: list[int] = []
    update = KFACState.update_averages
    refresh = Natural.refresh_stacks

    def update_and_note(self: KFACState, means: Any, guard: Any) -> bool:
        for factors in means.values():
            means_of_step.extend(weakref.ref(get_entries(t)) for t in factors.values())
        return update(self, means, guard)

    def refresh_and_count(self: Natural, averages: Any, states: Any) -> Any:
        gc.collect()
        alive.append(sum(reference() is not None for reference in means_of_step))
        return refresh(self, averages, states)

    monkeypatch.setattr(KFACState, "update_averages", update_and_note)
    monkeypatch.setattr(Natural, "refresh_stacks", refresh_and_count)
    torch.manual_seed(0)
    model = net()
    train(kfac(model, statistics_every=1, invert_every=1), model, 2)
    assert means_of_step
    assert alive == [0, 0]


def test_a_refreshed_stack_is_copied_before_the_next_is_stored(monkeypatch: Any) -> None:
    """Inverses of several shapes are never held twice at once."""
    stored: list[weakref.ref[Any]] = []
    alive: list[int] = []
    store = Natural._store_inverses

    def store_and_count(self: Natural, inverse: Any, averages: Any, state: Any) -> Any:
        gc.collect()
        alive.append(sum(reference() is not None for reference in stored))
        report = store(self, inverse, averages, state)
        stored.append(weakref.ref(state.right))
        return report

    monkeypatch.setattr(Natural, "_store_inverses", store_and_count)
    torch.manual_seed(0)
    model = net()
    train(kfac(model), model)
    assert alive == [0, 0]


class CopyCounter(TorchDispatchMode):
    """Counts copies into other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_a_plain_step_copies_no_direction_by_itself() -> None:
    """Gains and shifts of all norms are joined in one tensor; on a GPU each copy is a launch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.LayerNorm(5), nn.Linear(5, 4))
    model = model.double()
    optimizer = kfac(model, statistics_every=10, invert_every=10)
    train(optimizer, model, 2)
    x, y = batch(seed=2)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with CopyCounter() as counter:
        optimizer.step()
    assert counter.copies == 0
