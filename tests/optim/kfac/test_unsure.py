"""Statistics taken up without waiting for the device: as if one had waited, whatever they are.

On a CPU the steady route is forced, and statistics are spoiled on the way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac.blocks import entering
from pullback.optim.kfac.statistics import sweep
from pullback.optim.kfac.statistics.gather import Gatherer
from pullback.optim.kfac.stepping import moving, steady
from pullback.optim.kfac.stepping.look import finite


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(48, 4, bias=False)).double()


def run(
    unsure: bool, steps: int = 14, spoiled: Any = None, grads: Any = None, **options: Any
) -> tuple[pb.KFAC, list[Any]]:
    """Steps whose statistics (`spoiled`) or gradients (`grads`) are not finite at some of them."""
    net = model()
    given: dict[str, Any] = {
        "lr": 0.05, "damping": 0.1, "statistics_every": 2, "invert_every": 8, **options,
    }  # fmt: skip
    opt = pb.KFAC(net, likelihood=pb.likelihoods.Categorical(), **given)
    infos, plain = [], Gatherer.averages
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady, "usable", lambda params: unsure)
        for i in range(steps):

            def averages(self: Gatherer, *args: Any, at: int = i) -> Any:
                found = plain(self, *args)
                if at in (spoiled or ()):
                    next(iter(next(iter(found.values())).values())).mul_(torch.nan)
                return found

            patch.setattr(Gatherer, "averages", averages)
            g = torch.Generator().manual_seed(i)
            x = torch.randn(6, 2, 4, 4, generator=g, dtype=torch.float64)
            opt.zero_grad()
            F.cross_entropy(net(x), torch.arange(6) % 4).backward()
            if i in (grads or ()):
                next(net.parameters()).grad.fill_(torch.inf)  # pyright: ignore
            opt.step()
            if i not in (grads or ()):
                infos.append((i, opt.info))
    return opt, infos


def state(opt: pb.KFAC) -> list[Tensor]:
    averages = [v for a in opt.curvature.averages.values() for v in a.value.values()]
    return [*(p.detach() for p in opt.model.parameters()), *averages]


def same(one: pb.KFAC, two: pb.KFAC) -> None:
    for a, b in zip(state(one), state(two), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    held = [[(a.mass, a.count) for a in o.curvature.averages.values()] for o in (one, two)]
    assert held[0] == held[1]
    for name in ("steps", "taken", "skipped", "damping"):
        assert one._memory.get(name) == two._memory.get(name), name


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    from pullback.optim.kfac.stepping.learning import Learning

    calls, plain = [], Learning._learn_unsure

    def learn(self: Learning, *args: Any) -> None:
        plain(self, *args)
        calls.append(True)

    monkeypatch.setattr(Learning, "_learn_unsure", learn)
    return calls


def test_finite_ones_are_taken_up(counted: list[bool]) -> None:
    one, infos = run(True)
    assert True in counted
    two, wanted = run(False)
    same(one, two)
    assert infos == wanted


def test_inputs_that_wait_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = run(False, steps=3)
    monkeypatch.setattr(sweep, "waits", lambda x: True)
    same(one, run(False, steps=3)[0])


def test_averages_that_forget_wait(counted: list[bool]) -> None:
    one, _ = run(True, ema=0.0)
    assert True not in counted
    same(one, run(False, ema=0.0)[0])


@pytest.mark.parametrize("spoiled", [(4,), (6, 10), (12,), (0,), (8,)])
def test_those_that_are_not_finite_are_left(spoiled: tuple[int, ...], counted: list[bool]) -> None:
    one, infos = run(True, spoiled=spoiled)
    assert True in counted
    two, wanted = run(False, spoiled=spoiled)
    same(one, two)
    assert infos == wanted
    notes = [i for i, info in infos if "statistics" in info.notes]
    assert notes == list(spoiled)


def test_a_gradient_that_is_not_finite_leaves_everything(counted: list[bool]) -> None:
    opt, _ = run(True, steps=10)
    before = [t.clone() for t in state(opt)]
    held = [(a.mass, a.count) for a in opt.curvature.averages.values()]
    memory = dict(opt._memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady, "usable", lambda params: True)
        x = torch.randn(6, 2, 4, 4, dtype=torch.float64)
        opt.zero_grad()
        F.cross_entropy(opt.model(x), torch.arange(6) % 4).backward()
        next(opt.model.parameters()).grad.fill_(torch.inf)  # pyright: ignore
        opt.step()
    assert counted[-1]
    assert not opt.info.accepted
    assert not opt.info.taken
    for a, b in zip(before, state(opt), strict=True):
        assert torch.equal(a, b)
    assert held == [(a.mass, a.count) for a in opt.curvature.averages.values()]
    assert memory == dict(opt._memory)
    assert opt.statistics_due


def test_a_direction_that_is_not_finite_leaves_everything(counted: list[bool]) -> None:
    opt, _ = run(True, steps=10)
    before = [t.clone() for t in state(opt)]
    held = [(a.mass, a.count) for a in opt.curvature.averages.values()]
    memory = dict(opt._memory)
    inverse = next(iter(opt.curvature.inverses.values()))
    assert inverse.left is not None
    inverse.left.fill_(torch.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady, "usable", lambda params: True)
        x = torch.randn(6, 2, 4, 4, dtype=torch.float64)
        opt.zero_grad()
        F.cross_entropy(opt.model(x), torch.arange(6) % 4).backward()
        opt.step()
    assert counted[-1]
    assert not opt.info.accepted
    assert all(torch.equal(a, b) for a, b in zip(before, state(opt), strict=True))
    assert held == [(a.mass, a.count) for a in opt.curvature.averages.values()]
    assert memory == dict(opt._memory)


def test_the_move_alone_looks_at_the_gradients(
    counted: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, plain = [], moving.finite

    def finite(tensors: Any) -> Tensor:
        looked.append(len(tensors))
        return plain(tensors)

    monkeypatch.setattr(moving, "finite", finite)
    opt, _ = run(True, steps=9)
    taken = opt._memory["taken"]
    assert taken == 5
    assert len(looked) == taken - len(counted)
    assert counted


def test_statistics_that_were_lost_are_taken_when_the_next_pass_knows(counted: list[bool]) -> None:
    opt, _ = run(True, steps=9, grads=(4,))
    # what was lost at the fifth step was not known to the sixth pass, and taken by the seventh
    assert counted.count(True) >= 2
    assert opt._memory["steps"] == 8
    assert opt.info.accepted
    taken = [a.count for a in opt.curvature.averages.values()]
    assert len({*taken}) == 1
    assert taken[0] == opt._memory["taken"]
    assert taken[0] == 4


def test_saved_before_it_is_known() -> None:
    net = model()
    opt = pb.KFAC(net, 0.05, likelihood=pb.likelihoods.Categorical(), statistics_every=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady, "usable", lambda params: True)
        for _ in range(11):
            opt.zero_grad()
            x = torch.randn(6, 2, 4, 4, dtype=torch.float64)
            F.cross_entropy(net(x), torch.arange(6) % 4).backward()
            opt.step()
        assert opt._unsure is not None
        saved = opt.state_dict()
        assert opt._unsure is None
        opt.load_state_dict(saved)
        assert opt._memory["steps"] == 11


def test_diagonals_tell_of_large_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entering, "_LARGE", 1)
    x = torch.randn(7, 3, 4)
    new = [x.mT @ x, torch.ones(5, 2, 2), torch.ones(1, 6)]
    unsure = entering.Unsure([], entering.Entering([]), new)
    assert bool(finite(unsure.telling()))
    new[0][2, :, 1] = new[0][2, 1] = torch.nan
    assert not bool(finite(unsure.telling()))
