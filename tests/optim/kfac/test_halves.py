"""Averages in half their memory: the same numbers, saved, loaded, copied and moved along."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback.optim.kfac.blocks import averages
from pullback.optim.kfac.blocks.averages import Average
from pullback.optim.kfac.blocks.halves import Half
from pullback.optim.kfac.blocks.rescaling import rescale_

from .test_steady import OPTIONS, built, cuda, moved_by, near, net, recorder, train
from .test_unsure import run, same

__all__ = ["recorder"]


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix by halves, as large ones on a GPU."""
    monkeypatch.setattr(averages, "halved", lambda side: side.ndim == 3 and side.shape[-1] > 1)


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages, "halved", lambda side: False)


def symmetric(groups: int, n: int) -> Tensor:
    x = torch.randn(groups, n, n, dtype=torch.float64)
    return x + x.mT


@pytest.mark.parametrize("groups", [0, 1, 3])
@pytest.mark.parametrize("n", range(1, 9))
def test_half_of_the_memory_and_the_same_bits(groups: int, n: int) -> None:
    side = symmetric(groups, n)
    half = Half.of(side)
    assert half.memory.numel() == groups * n * (n + 1) // 2
    assert half.shape == side.shape
    assert torch.equal(half.whole(), side)
    turned = side.mT.contiguous().mT
    assert torch.equal(Half.of(turned).memory, half.memory)


def test_averages_are_those_of_the_matrices(halves) -> None:
    a, b, vector = symmetric(2, 5), symmetric(2, 5), torch.rand(2, 5, dtype=torch.float64)
    average = Average()
    average.update({"a": a, "v": vector}, 0.9, plain=True)
    average.update({"a": b, "v": vector}, 0.9, plain=True)
    torch.testing.assert_close(average.value["a"], 0.1 * (0.9 * a + b))
    torch.testing.assert_close(average.corrected()["v"], vector)
    assert average.mean is not None
    torch.testing.assert_close(average.mean["a"], (a + b) / 2)
    assert sum(t.numel() for t in average.memory[:2]) == 2 * 15 + 10
    average.update({"a": symmetric(2, 4), "v": vector}, 0.9, plain=False)  # another layer now
    assert average.count == 1


@pytest.mark.parametrize("options", [*OPTIONS, {"damping": pb.optim.kfac.Invariant(0.1)}], ids=str)
def test_the_same_training(recorder, halves, monkeypatch, options) -> None:
    model = net()
    opt = built(model, **options)
    found = train(model, opt, 20)
    assert any(isinstance(h, Half) for a in opt.curvature.averages.values() for h in held(a))
    bytes_ = opt.memory()["averages"]
    whole(monkeypatch)
    other = net()
    dense = built(other, **options)
    assert near(found, train(other, dense, 20))
    assert bytes_ < dense.memory()["averages"]
    assert torch.allclose(opt.gram().dense(), dense.gram().dense(), rtol=1e-10, atol=1e-12)
    assert str(opt.coverage()) == str(dense.coverage())


def held(average: Average) -> list[Any]:
    return list(average.held.values())


@pytest.mark.parametrize("spoiled", [(), (4, 6), (10,)])
def test_statistics_that_are_not_finite(halves, monkeypatch, spoiled) -> None:
    opt, _ = run(True, spoiled=spoiled)
    whole(monkeypatch)
    dense, _ = run(False, spoiled=spoiled)
    same(opt, dense)


def saved(opt: pb.KFAC) -> list[Tensor]:
    blocks = opt.state_dict()["state"]["pullback"]["curvature"]["blocks"]
    return [t for b in blocks for t in b["average"]["value"].values()]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("ekfac", [False, True])
def test_saved_as_matrices_and_loaded_either_way(halves, monkeypatch, first, ekfac) -> None:
    """What halves saved goes on as matrices, and what matrices saved (an older file) by halves."""
    by_halves, as_whole = averages.halved, lambda side: False
    monkeypatch.setattr(averages, "halved", by_halves if first else as_whole)
    model = net()
    opt = built(model, ekfac=ekfac)
    train(model, opt, 7)
    state = copy.deepcopy(opt.state_dict())
    assert all(t.shape[-1] == t.shape[-2] for t in saved(opt) if t.ndim == 3)
    twin = copy.deepcopy(model)
    monkeypatch.setattr(averages, "halved", as_whole if first else by_halves)
    other = built(twin, ekfac=ekfac)
    other.load_state_dict(state)
    for a, b in zip(saved(opt), saved(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0.0)  # to the bits of the symmetric part
    found = train(twin, other, 8, start=7)
    monkeypatch.setattr(averages, "halved", by_halves if first else as_whole)
    assert near(train(model, opt, 8, start=7), found)


def test_resumed_to_the_same_bits(halves) -> None:
    model = net()
    opt = built(model)
    train(model, opt, 7)
    twin = copy.deepcopy(model)
    other = built(twin)
    other.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    copied = copy.deepcopy(opt)
    results = [train(m, o, 8, start=7) for m, o in ((model, opt), (twin, other))]
    assert torch.equal(*results)
    assert torch.equal(results[0], train(copied.model, copied, 8, start=7))
    assert [t.shape for t in moved_by(opt)] == [t.shape for t in moved_by(copied)]


def test_moved_to_another_dtype(halves) -> None:
    average = Average({"a": symmetric(1, 5)})
    average.moved(torch.device("cpu"), torch.float32)
    assert isinstance(held(average)[0], Half)
    assert average.value["a"].dtype == torch.float32


def test_corrected_eigenvalues_are_no_symmetric_matrix(halves) -> None:
    values = torch.rand(1, 4, 4, dtype=torch.float64)
    average = Average(symmetric=False)
    average.update({"values": values}, 0.5, plain=False)
    assert torch.equal(average.corrected()["values"], values)


def test_rescaled_with_the_parameters(halves, monkeypatch) -> None:
    found = []
    for on in (True, False):
        if not on:
            whole(monkeypatch)
        model = net()
        opt = built(model)
        train(model, opt, 2)
        factor = torch.tensor([2.0, 3.0, 0.5, 1.0], dtype=torch.float64)
        given = {"first.weight": [(factor[:, None], True)], "first.bias": [(factor, True)]}
        rescale_(opt.curvature, dict(model.named_parameters()), given)
        found.append(saved(opt))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@cuda
@pytest.mark.cuda
def test_large_sides_on_a_gpu() -> None:
    side = symmetric(1, 2049).float().cuda()
    average = Average({"a": side, "b": side[:, :2047, :2047].contiguous()})
    assert [isinstance(h, Half) for h in held(average)] == [True, False]
    assert torch.equal(average.value["a"], side)


def test_one_mask_for_all_of_a_size() -> None:
    one, two, other = (Half.of(symmetric(1, n)) for n in (6, 7, 8))
    assert one.low is two.low
    assert one.low is not other.low
