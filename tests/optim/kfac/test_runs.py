"""Tensors side by side in one piece of memory are treated as one: the same numbers, fewer calls."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from pullback.maps.layers.moments import Moments
from pullback.optim.kfac.blocks.averages import Average
from pullback.optim.kfac.blocks.curvature import Curvature
from pullback.optim.kfac.blocks.damping import as_damping
from pullback.optim.kfac.blocks.entering import take_up
from pullback.optim.kfac.blocks.halves import Half
from pullback.optim.kfac.blocks.runs import apart, in_a_row, in_runs, joined, runs
from pullback.optim.kfac.statistics.sums import Key, Sums, Term, averaged

from .test_halves import halves, symmetric
from .test_steady import built, net, train

__all__ = ["halves"]


def stacked(count: int, *shape: int) -> list[Tensor]:
    return list(torch.randn(count, *shape, dtype=torch.float64).unbind())


def test_those_without_a_gap_in_the_order_of_their_memory() -> None:
    a, b = stacked(5, 2, 3), stacked(3, 4)
    assert runs(a) == [[0, 1, 2, 3, 4]]
    assert runs([a[2], a[0], a[1]]) == [[1, 2, 0]]
    assert runs([a[0], a[1], a[3], a[4]]) == [[0, 1], [2, 3]]
    mixed = [a[0], b[0], a[1], b[2]]
    assert sorted(runs(mixed)) == [[0, 2], [1], [3]]
    assert runs([a[0], a[0]]) == [[0], [1]]
    assert runs([]) == []


def test_neighbors_of_another_kind() -> None:
    memory = torch.zeros(40)
    one, two, other = memory[:6].view(2, 3), memory[6:12].view(2, 3), memory[12:18].view(3, 2)
    assert runs([one, two, other]) == [[0, 1], [2]]
    assert runs([one, two.view(torch.int32)]) == [[0], [1]]
    square = memory[:8].view(2, 2, 2).unbind()
    assert runs([square[0], square[1].mT]) == [[0], [1]]
    assert not in_a_row([square[0], square[1].mT])
    assert not in_a_row([one, other])
    assert runs(list(memory[:3].unbind())) == [[0], [1], [2]]  # no axis to join them on
    assert len(runs([torch.zeros(2, 0), torch.zeros(2, 0)])) == 2
    assert not in_a_row([torch.zeros(0), torch.zeros(0)])


def test_other_storages_are_no_neighbors() -> None:
    own = [torch.zeros(128) for _ in range(50)]
    assert len(runs(own)) == 50
    assert not in_a_row(own)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_joined_they_are_the_same_memory(order: list[int]) -> None:
    some = stacked(3, 2, 3, 3)
    (whole,) = in_runs([some[i] for i in order])
    assert torch.equal(whole, torch.cat(some))
    assert in_a_row(some)
    assert not in_a_row(some[::-1])
    joined(some).mul_(2)
    assert torch.equal(whole, torch.cat(some))
    lone = some[1]
    assert joined([lone]) is lone


def test_apart_from_others() -> None:
    some = stacked(3, 4)
    own = apart(some[1])
    assert torch.equal(own, some[1])
    assert own.untyped_storage().nbytes() == own.nbytes
    assert apart(own) is own


def blocks(count: int) -> list[Key]:
    return [Key("kronecker", (f"{i}.weight",)) for i in range(count)]


def statistics(count: int, layout: str) -> dict[Key, dict[str, Tensor]]:
    """Both sides of some blocks, whose outputs lie in memory in different ways."""
    inputs = [symmetric(1, 5) for _ in range(count)]
    outputs = torch.stack([symmetric(1, 6) for _ in range(count)])
    rows = list(outputs.unbind())
    if layout == "reversed":
        rows.reverse()
    elif layout == "gaps":
        wide = torch.stack([outputs, outputs], 1).flatten(0, 1)
        rows = [wide[2 * i + (i > 1)] for i in range(count)]
    elif layout == "apart":
        rows = [r.clone() for r in rows]
    names, keys = ("Linear.last.inputs", "Linear.last.outputs"), blocks(count)
    sides = [dict(zip(names, both, strict=True)) for both in zip(inputs, rows, strict=True)]
    return dict(zip(keys, sides, strict=True))


def take(held: Curvature, found: dict[Key, dict[str, Tensor]], ema: float, unsure: bool) -> None:
    """As a step does that waits, or one that does not."""
    some = held.unsure(found) if unsure else None
    if some is None:
        held.take(found, ema, as_damping(0.1), 0.1)
    else:
        some.enter(ema, torch.zeros(()))


LAYOUTS = ["in a row", "reversed", "gaps", "apart"]


@pytest.mark.parametrize("unsure", [False, True])
@pytest.mark.parametrize("by_halves", [False, True])
@pytest.mark.parametrize("layouts", [*([x] for x in LAYOUTS), LAYOUTS, LAYOUTS[::-1]], ids=str)
def test_averages_however_statistics_lie(request, layouts, by_halves, unsure) -> None:
    """Σ ema^(t − s) (1 − ema) x_s, in all orders and with every change from one to another."""
    if by_halves:
        request.getfixturevalue("halves")
    held, ema, want = Curvature(), 0.8, {}
    for layout in [*layouts, *layouts, layouts[0]]:
        found = statistics(4, layout)
        for key, new in found.items():
            for name, v in new.items():
                want[key, name] = ema * want.get((key, name), 0.0) + (1 - ema) * v
        take(held, found, ema, unsure)
    for (key, name), value in want.items():
        torch.testing.assert_close(held.averages[key].value[name], value, rtol=1e-12, atol=1e-14)
    assert isinstance(next(iter(held.averages[blocks(1)[0]].held.values())), Half) == by_halves


def parts(held: Curvature, name: str) -> list[Tensor]:
    own = [average.held[name] for average in held.averages.values()]
    return [h.memory if isinstance(h, Half) else h for h in own]


@pytest.mark.parametrize("by_halves", [False, True])
def test_held_in_one_piece_from_the_first_time(request, by_halves) -> None:
    if by_halves:
        request.getfixturevalue("halves")
    held = Curvature()
    take(held, statistics(4, "in a row"), 0.9, False)
    assert in_a_row(parts(held, "Linear.last.outputs"))
    before = parts(held, "Linear.last.outputs")
    take(held, statistics(4, "in a row"), 0.9, True)
    assert all(a is b for a, b in zip(before, parts(held, "Linear.last.outputs"), strict=True))


@pytest.mark.parametrize("unsure", [False, True])
def test_brought_together_again(halves, unsure) -> None:
    """After loading, moving or rescaling every average has memory of its own."""
    held, other, ema = Curvature(), Curvature(), 0.9
    for _ in range(2):
        found = statistics(4, "in a row")
        take(held, found, ema, unsure)
        take(other, found, ema, unsure)
    for average in other.averages.values():
        average.value = {n: v.clone() for n, v in average.value.items()}
    assert not in_a_row(parts(other, "Linear.last.outputs"))
    found = statistics(4, "in a row")
    take(held, found, ema, unsure)
    take(other, found, ema, unsure)
    assert in_a_row(parts(other, "Linear.last.outputs"))
    for key, average in held.averages.items():
        for name, value in average.value.items():
            assert torch.equal(value, other.averages[key].value[name])


def test_one_call_for_all_in_a_row(halves, monkeypatch) -> None:
    held = Curvature()
    for _ in range(2):
        take(held, statistics(6, "in a row"), 0.9, True)
    found, seen, form = statistics(6, "in a row"), [], Half.of

    def of(side: Tensor) -> Half:
        seen.append(side.shape)
        return form(side)

    monkeypatch.setattr(Half, "of", of)
    unsure = held.unsure(found)
    assert unsure is not None
    assert len(unsure.telling()) == 7  # inputs lie apart
    unsure.enter(0.9, torch.zeros(()))
    assert sorted(seen) == [(1, 5, 5)] * 6 + [(6, 6, 6)]


def test_statistics_of_other_shapes_begin_anew() -> None:
    held = Curvature()
    for _ in range(2):
        take(held, statistics(3, "in a row"), 0.9, True)
    found = statistics(3, "in a row")
    key = next(iter(found))
    found[key]["Linear.last.outputs"] = new = symmetric(1, 3)
    assert held.unsure(found) is None
    take(held, found, 0.9, False)
    assert [a.count for a in held.averages.values()] == [1, 3, 3]
    torch.testing.assert_close(held.averages[key].corrected()["Linear.last.outputs"], new)
    assert held.unsure({Key("units", ("gain",)): {"squares": new}}) is None


def test_another_dtype_is_waited_for() -> None:
    held = Curvature()
    take(held, statistics(3, "in a row"), 0.9, False)
    found = {k: {n: v.float() for n, v in x.items()} for k, x in statistics(3, "apart").items()}
    rows = torch.stack([x["Linear.last.outputs"] for x in found.values()]).unbind()
    for new, row in zip(found.values(), rows, strict=True):
        new["Linear.last.outputs"] = row
    assert held.unsure(found) is None
    take(held, found, 0.9, False)
    assert {t.dtype for a in held.averages.values() for t in a.memory} == {torch.float32}


def test_means_of_all_statistics_beside_them() -> None:
    held, seen = [Average() for _ in range(3)], []
    for _ in range(3):
        new = stacked(3, 1, 4)
        seen.append(torch.stack(new))
        pairs = [(a, {"v": v}) for a, v in zip(held, new, strict=True)]
        take_up(pairs, 0.9, plain=True)
    for average, want in zip(held, torch.stack(seen).mean(0), strict=True):
        assert average.mean is not None
        torch.testing.assert_close(average.mean["v"], want)


@pytest.mark.parametrize("by_halves", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_memory_of_their_own(request, by_halves, copied: Any) -> None:
    if by_halves:
        request.getfixturevalue("halves")
    held = Curvature()
    for _ in range(2):
        take(held, statistics(4, "in a row"), 0.9, True)
    average = next(iter(held.averages.values()))
    other, curvature = copied(average), copied(held)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in other.memory)
    before = {n: v.clone() for n, v in average.value.items()}
    found = statistics(4, "in a row")
    take(held, {k: dict(v) for k, v in found.items()}, 0.9, True)
    for name, value in before.items():
        assert torch.equal(other.value[name], value)
        assert not torch.equal(average.value[name], value)
    take(curvature, found, 0.9, True)
    for a, b in zip(held.averages.values(), curvature.averages.values(), strict=True):
        assert all(torch.equal(v, b.value[n]) for n, v in a.value.items())
    corrected = average.corrected()
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in corrected.values())


def test_a_saved_state_is_not_larger_than_what_it_holds() -> None:
    sizes = []
    for lone in (False, True):
        model = net()
        opt = built(model)
        train(model, opt, 7)
        own = [t for a in opt.curvature.averages.values() for t in a.memory]
        assert any(t.untyped_storage().nbytes() > t.nbytes for t in own) or lone
        if lone:
            for a in opt.curvature.averages.values():
                a.value = {n: v.clone() for n, v in a.value.items()}
        sizes.append([len(pickle.dumps(x)) for x in (opt.state_dict(), opt.curvature)])
    assert all(abs(a - b) < 2000 for a, b in zip(*sizes, strict=True))


def test_kept_and_restored() -> None:
    held = Curvature()
    for _ in range(2):
        take(held, statistics(3, "in a row"), 0.9, True)
    kept = held.kept(averages=True)
    want = [v.clone() for a in held.averages.values() for v in a.value.values()]
    take(held, statistics(3, "in a row"), 0.9, True)
    held.restore(kept)
    got = [v for a in held.averages.values() for v in a.value.values()]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    take(held, statistics(3, "in a row"), 0.9, True)
    assert [a.count for a in held.averages.values()] == [3, 3, 3]


def test_two_stacks_of_one_size_are_means_of_both() -> None:
    """mean (a, 1)(a, 1)ᵀ, for layers whose inputs were stacked with others of their length."""
    term, sums, want = Term.named("Linear"), {}, {}
    for batch, count in ((7, 3), (9, 2)):
        x = torch.randn(count, batch, 4, dtype=torch.float64)
        stack = ((x.mT @ x)[:, None], x.sum(1)[:, None])
        for i, own in enumerate(x):
            key = Key("kronecker", (f"{batch}.{i}.weight", f"{batch}.{i}.bias"), True)
            m = Moments(stack[0][i], stack[1][i], float(batch), stack)
            sums[key] = Sums({term: m}, {term: torch.eye(2, dtype=torch.float64)[None]})
            both = torch.cat([own, torch.ones(batch, 1, dtype=torch.float64)], 1)
            want[key] = (both.T @ both / batch)[None]
    found = averaged(sums, 2.0, 1.0)
    for key, value in want.items():
        torch.testing.assert_close(found[key][term.tags[0]], value)
    assert len(runs([found[k][term.tags[0]] for k in want])) == 2
