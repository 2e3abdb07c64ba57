"""Refreshes for which the host does not wait: the same steps, and failures are found later.

On a CPU, where every step waits, steps are told to be deferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.grams.kronecker.packed_matrix import get_entries
from pullback.optim.kfac import Spectral, TwoSided
from pullback.optim.kfac.rules import spectral
from pullback.optim.kfac.rules.spectral import PendingRoots, start_roots
from pullback.optim.kfac.stacks import BlockStates
from pullback.optim.kfac.state import KFACState

RULES = {"spectral": Spectral, "two-sided": TwoSided}
#: refreshes at steps 0, which waits in any case, 1, 2, 4, 6, 8
EVERY = {"statistics_every": 1, "invert_every": 2}
#: the kernel that reads a flag adds in another order
ROUND_OFF = 1e-5
#: on a GPU roots are in float16
ROOT_ROUND_OFF = {"cpu": 1e-5, "cuda": 1e-2}


class Spy:
    """How many refreshes were deferred."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "cpu":
        monkeypatch.setattr(pb.KFAC, "_can_defer", defer_if_possible)
    return torch.device(request.param)


def defer_if_possible(self: Any, means: Mapping[Any, Any], gradients: Any) -> bool:
    """Stand for `KFAC._can_defer` on a CPU."""
    curvature = self._curvature
    if self._is_refresh_due(means) and not curvature.can_refresh_on_device():
        return False
    is_ready = curvature.measured_keys <= curvature.states.ready
    return is_ready and curvature.measured_keys.issuperset(means)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    refresh = BlockStates.refresh_on_device

    def count(self: BlockStates, *args: Any) -> Any:
        spy.count += 1
        return refresh(self, *args)

    monkeypatch.setattr(BlockStates, "refresh_on_device", count)
    return spy


def make_network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Linear(8, 3)).to(device)


def make_rule(name: str, device: torch.device) -> Spectral:
    return RULES[name](cuda_graph=device.type == "cuda")


def take_step(opt: pb.KFAC, model: nn.Module, i: int, *, is_broken: bool = False) -> None:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(32, 6, generator=generator).to(device)
    y = torch.randint(0, 3, (32,), generator=generator).to(device)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if is_broken:
        weight = next(model.parameters())
        assert weight.grad is not None
        weight.grad[0, 0] = torch.nan
    opt.step()


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def start_training(name: str, device: torch.device, *, steps: int) -> tuple[nn.Module, pb.KFAC]:
    model = make_network(device)
    opt = pb.KFAC(model, rule=make_rule(name, device), **EVERY)
    for i in range(steps):
        take_step(opt, model, i)
    return model, opt


def fail_all_roots(factors: Any, damping: float) -> PendingRoots:
    """Stand for `start_roots`, where nothing converges."""
    pending = start_roots(factors, damping)
    for stack in pending.stacks:
        stack.roots.fill_(torch.nan)
        stack.has_converged.fill_(False)
    return pending


def fail_roots_of_outputs(factors: Any, damping: float) -> PendingRoots:
    """Stand for `start_roots` of the two-sided rule, where every other factor is of outputs."""
    pending = start_roots(factors, damping)
    for stack in pending.stacks[1::2]:
        stack.has_converged.fill_(False)
    return pending


def get_blocks(opt: pb.KFAC) -> list[Any]:
    return list(opt.blocks.states.blocks.values())


def get_roots(opt: pb.KFAC) -> dict[Any, Tensor]:
    blocks = opt.blocks.states.blocks
    return {k: b.state.root.clone() for k, b in blocks.items() if hasattr(b.state, "root")}


def train(name: str, device: torch.device, steps: int = 9) -> tuple[Tensor, dict[Any, Tensor]]:
    model, opt = start_training(name, device, steps=steps)
    return vector(model), get_roots(opt)


@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_refreshes_that_wait(
    name: str, device: torch.device, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, roots = train(name, device)
    assert spy.count == 5
    monkeypatch.setattr(KFACState, "can_refresh_on_device", lambda self: False)
    expected_weights, expected_roots = train(name, device)
    assert spy.count == 5
    torch.testing.assert_close(weights, expected_weights, atol=ROUND_OFF, rtol=ROUND_OFF)
    tolerance = ROOT_ROUND_OFF[device.type]
    for key, root in roots.items():
        torch.testing.assert_close(root, expected_roots[key], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", RULES)
def test_a_root_that_fails_is_found_again_before_the_next_step(
    name: str, device: torch.device, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = start_training(name, device, steps=2)
    old = get_roots(opt)
    with monkeypatch.context() as patch:
        patch.setattr(spectral, "start_roots", fail_all_roots)
        take_step(opt, model, 2)
    assert spy.count == 2
    blocks = opt._curvature.states.blocks
    assert all(torch.equal(blocks[k].state.root, old[k]) for k in old)
    assert vector(model).isfinite().all()
    assert opt.info.accepted
    assert not opt.info.notes
    new = get_roots(opt)
    assert not any(torch.equal(new[k], old[k]) for k in old)
    assert all(root.isfinite().all() for root in new.values())


@pytest.mark.parametrize("name", RULES)
def test_a_root_that_fails_twice_is_noted(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = start_training(name, device, steps=2)
    old = get_roots(opt)
    find = spectral.inverse_roots

    def fail(*args: Any, **options: Any) -> Any:
        stacks = find(*args, **options)
        for stack in stacks:
            stack.has_converged.fill_(False)
        return stacks

    monkeypatch.setattr(spectral, "inverse_roots", fail)
    monkeypatch.setattr(spectral, "_find_fine_root", lambda factor, damping: None)
    take_step(opt, model, 2)
    assert opt.info.accepted
    notes = "; ".join(opt.info.notes.values())
    assert "did not converge" in notes
    assert "the last good one stays" in notes
    new = get_roots(opt)
    assert all(torch.equal(new[k], old[k]) for k in old)


@pytest.mark.parametrize("name", RULES)
def test_a_void_step_changes_neither_parameters_nor_state(
    name: str, device: torch.device, spy: Spy
) -> None:
    """At step 4, where averages hold statistics that the roots of step 2 have not seen."""
    model, opt = start_training(name, device, steps=4)
    before = vector(model)
    state = deepcopy(opt.state_dict()["state"])
    with pytest.warns(RuntimeWarning, match="not finite"):
        break_step(opt, model)
    assert not opt.info.accepted
    assert spy.count == 3
    assert torch.equal(vector(model), before)
    assert_same(opt.state_dict()["state"], state)
    take_step(opt, model, 2)
    assert opt.info.accepted
    assert spy.count == 4


def run_with_breaks(
    device: torch.device, broken: set[int], *, reads: bool
) -> tuple[list[int], Tensor]:
    """Return the batches whose steps changed roots, and the weights."""
    model = make_network(device)
    rule = make_rule("spectral", device)
    opt = pb.KFAC(model, rule=rule, statistics_every=2, invert_every=4)
    refreshed = []
    roots = None
    for i in range(24):
        take_step(opt, model, i, is_broken=i in broken)
        if reads:
            assert opt.info.accepted == (i not in broken)
        blocks = opt._curvature.states.blocks.values()  # opt.blocks would read the flags
        new = [b.state.root.clone() for b in blocks if hasattr(b.state, "root")]
        if roots is None or not all(map(torch.equal, roots, new)):
            refreshed.append(i)
        roots = new
    return refreshed, vector(model)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("broken", [{8}, {8, 9}, {7, 8}, {8, 12}], ids=str)
def test_a_void_refresh_that_is_not_read_comes_soon_after(
    broken: set[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    refreshed, _ = run_with_breaks(device, broken, reads=False)
    gaps = [later - earlier for earlier, later in pairwise(refreshed)]
    assert max(gaps) <= 4 + 2 * len(broken) + 1
    refreshed_when_read, weights = run_with_breaks(device, broken, reads=True)
    monkeypatch.setattr(KFACState, "can_refresh_on_device", lambda self: False)
    expected, expected_weights = run_with_breaks(device, broken, reads=True)
    assert refreshed_when_read == expected
    torch.testing.assert_close(weights, expected_weights, atol=ROUND_OFF, rtol=ROUND_OFF)


@pytest.mark.parametrize("name", RULES)
def test_statistics_that_are_not_finite_do_not_count(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = start_training(name, device, steps=4)
    roots = get_roots(opt)
    counted = opt._schedule.statistics_count
    collect = pb.KFAC._collect_statistics

    def spoil(self: pb.KFAC, *args: Any) -> Any:
        means = collect(self, *args)
        for factors in means.values():
            for factor in factors.values():
                get_entries(factor).mul_(torch.nan)
        return means

    with monkeypatch.context() as patch:
        patch.setattr(pb.KFAC, "_collect_statistics", spoil)
        take_step(opt, model, 4)
    assert opt.info.accepted
    assert not opt.info.took_statistics
    assert "not finite" in opt.info.notes["statistics"]
    assert opt._schedule.statistics_count == counted
    new = get_roots(opt)
    assert all(torch.equal(new[k], roots[k]) for k in roots)


def test_a_void_refresh_keeps_notes_and_roots(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where roots would have failed."""
    model, opt = start_training("spectral", device, steps=4)
    for block in get_blocks(opt):
        block.note = "an old note"
    roots = get_roots(opt)
    monkeypatch.setattr(spectral, "start_roots", fail_all_roots)
    with pytest.warns(RuntimeWarning, match="not finite"):
        break_step(opt, model)
    new = get_roots(opt)
    assert all(torch.equal(new[k], roots[k]) for k in roots)
    assert all(block.note == "an old note" for block in get_blocks(opt))


def test_one_of_two_roots_that_fails(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of a block keep their last roots, and are found again."""
    model, opt = start_training("two-sided", device, steps=2)
    old = [b.state.output_root.clone() for b in get_blocks(opt) if hasattr(b.state, "output_root")]
    with monkeypatch.context() as patch:
        patch.setattr(spectral, "start_roots", fail_roots_of_outputs)
        take_step(opt, model, 2)
    blocks = opt._curvature.states.blocks.values()
    unread = [b.state.output_root for b in blocks if hasattr(b.state, "output_root")]
    assert all(map(torch.equal, unread, old))
    assert opt.info.accepted
    new = [b.state.output_root for b in get_blocks(opt) if hasattr(b.state, "output_root")]
    assert not any(map(torch.equal, new, old))


def test_another_shape_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_network(device)
    opt = pb.KFAC(model, rule=make_rule("spectral", device), **EVERY)
    take_step(opt, model, 0)

    def widen(self: Spectral, state: Any, roots: Any) -> None:
        state.root = F.pad(roots[0], (0, 1))

    monkeypatch.setattr(Spectral, "set_roots", widen)
    with pytest.raises(pb.PullbackError, match="changed the shape of root from"):
        take_step(opt, model, 1)


def test_an_exception_after_a_refresh_leaves_nothing_behind(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_network(device)
    opt = pb.KFAC(model, rule=Spectral(cuda_graph=False), **EVERY)
    for i in range(2):
        take_step(opt, model, i)

    def fail(*args: Any) -> Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Spectral, "direction", fail)
        with pytest.raises(MemoryError):
            take_step(opt, model, 2)
    assert opt._curvature.deferred_refresh is not None
    deepcopy(opt)
    assert opt._curvature.deferred_refresh is None
    take_step(opt, model, 2)
    assert opt.info.accepted


def break_step(opt: pb.KFAC, model: nn.Module) -> None:
    """Take a step with a gradient that is not finite, and let the host see it."""
    take_step(opt, model, 4, is_broken=True)
    assert not opt.info.accepted


def assert_same(one: Any, two: Any) -> None:
    """Compare nested states to the bit."""
    if isinstance(one, Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, Mapping):
        assert one.keys() == two.keys()
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, list | tuple):
        for pair in zip(one, two, strict=True):
            assert_same(*pair)
    else:
        assert one == two


def test_a_copy_between_steps_has_the_refreshed_state(device: torch.device) -> None:
    model = make_network(device)
    opt = pb.KFAC(model, rule=make_rule("spectral", device), **EVERY)
    for i in range(3):
        take_step(opt, model, i)
    twin = deepcopy({"model": model, "opt": opt})
    for i in range(3, 6):
        take_step(opt, model, i)
        take_step(twin["opt"], twin["model"], i)
    assert torch.equal(vector(model), vector(twin["model"]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("name", RULES)
def test_steps_with_a_refresh_wait_for_nothing(name: str, spy: Spy) -> None:
    """But for those of the two-sided rule in the backward pass, where it counts positions."""
    device = torch.device("cuda")
    model = make_network(device)
    opt = pb.KFAC(model, rule=make_rule(name, device), **EVERY)
    x = torch.randn(32, 6, device=device)
    y = torch.randint(0, 3, (32,), device=device)
    try:
        for i in range(12):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.cuda.set_sync_debug_mode("error" if i >= 6 else "default")
            opt.step()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opt.info.accepted
    assert spy.count == 6


class Waiting(Spectral):
    """A subclass that writes into the old root, which another step may still need."""

    name = "waiting"

    def set_roots(self, state: Any, roots: Any) -> None:
        state.root.copy_(roots[0])


def test_the_refresh_of_a_subclass_is_waited_for(device: torch.device, spy: Spy) -> None:
    assert Spectral().refreshes_on_device
    assert TwoSided().refreshes_on_device
    assert not Waiting().refreshes_on_device
    assert not Spectral(whitening=False).refreshes_on_device
    model = make_network(device)
    opt = pb.KFAC(model, rule=Waiting(), **EVERY)
    for i in range(5):
        take_step(opt, model, i)
    assert opt.info.accepted
    assert spy.count == 0
