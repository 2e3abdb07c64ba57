"""Statistics are summed over processes while the backward pass goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pullback as pb
from pullback.optim.kfac import Eigenbasis
from tests.kfac_options import kfac_of

from .test_kfac import OPTIONS
from .training import batch, model_of, share
from .world import GROUPS, World, place

COUNTS = (15, 8, 13)


def calls(opt: pb.KFAC) -> list[int]:
    """How often counts and factors were sent so far."""
    sent = opt.traffic()
    return [sent[what].calls if what in sent else 0 for what in ("counts", "factors")]


def events(rank: int, size: int, options: dict[str, Any]) -> Any:
    """Return what each statistics step sends in its backward pass, and in `step`."""
    net = DistributedDataParallel(model_of("dense"))
    opt = kfac_of(net, **{"lr": 0.05, "statistics_every": 2, "invert_every": 4, **options})
    computed = []
    for number in range(10):
        x, y = batch(10 * number + rank, 8, "dense")
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        start = calls(opt)
        loss.backward()
        middle = calls(opt)
        opt.step()
        if number % 2 == 0:
            pieces = zip(start, middle, calls(opt), strict=True)
            computed.append([(b - a, c - b) for a, b, c in pieces])
    return computed


#: calls for factors with statistics, and with inversions
EXPECTED = dict.fromkeys(("clip", "invariant damping", "spectral", "eigenbasis"), (1, 1))


@pytest.mark.parametrize("name", EXPECTED)
def test_sums_are_under_way_before_the_backward_pass_returns(world: World, name: str) -> None:
    often, inverting = EXPECTED[name]
    first, *others = world.run(events, OPTIONS[name])
    assert all(other == first for other in others)
    assert first[0] == [(0, 1), (0, inverting)]  # the first statistics show the shapes
    # inversions follow the first three, and the fifth
    sent = [inverting, inverting, often, inverting]
    assert first[1:] == [[(1, 0), (often, n - often)] for n in sent]


@dataclass(frozen=True)
class Pass:
    """One step's samples on this process; the mean of losses over processes is the joint one."""

    net: Any
    model: nn.Module
    rank: int
    size: int
    x: Tensor
    y: Tensor

    def loss(self, rows: slice = slice(None)) -> Tensor:
        summed = F.cross_entropy(self.net(self.x[rows]), self.y[rows], reduction="sum")
        return summed / sum(COUNTS) * self.size

    @property
    def halves(self) -> tuple[slice, slice]:
        middle = (len(self.x) + 1) // 2
        return slice(middle), slice(middle, None)


def drop_a_pass(step: Pass, opt: pb.KFAC) -> None:
    """Gradients of a first pass are cleared."""
    replace(step, x=step.x.flip(0)).loss().backward()
    opt.zero_grad()
    step.loss().backward()


def hold_a_pass_open(step: Pass, opt: pb.KFAC) -> None:
    """A pass that stays open keeps statistics back until `step`, on one process alone."""
    loss = step.loss()
    outputs = step.model(step.x) if step.rank == 0 else None
    loss.backward()
    del outputs


def make_two_passes(step: Pass, opt: pb.KFAC) -> None:
    for rows in step.halves:
        step.loss(rows).backward()


def make_two_calls(step: Pass, opt: pb.KFAC) -> None:
    first, second = (step.loss(rows) for rows in step.halves)
    (first + second).backward()


def measure_nothing_on_the_last(step: Pass, opt: pb.KFAC) -> None:
    """The last process's samples count for nothing."""
    if step.rank == 2:
        step.net(step.x)
        sum(p.sum() * 0 for p in step.model.parameters()).backward()  # pyright: ignore
        return
    measured = COUNTS[0] + COUNTS[1]
    step.loss(slice(measured if step.size == 1 else None)).backward()


#: other ways than one pass per step
LOOPS: dict[str, Callable[[Pass, pb.KFAC], None]] = {
    "dropped": drop_a_pass,
    "skipped": hold_a_pass_open,
    "two passes": make_two_passes,
    "two calls": make_two_calls,
    "unmeasured": measure_nothing_on_the_last,
}


def rows_of(rank: int, size: int) -> slice:
    """Return this process's rows of the joined batch."""
    if size == 1:
        return slice(None)
    return share(COUNTS, rank)


def loop(rank: int, size: int, variant: str) -> tuple[Tensor, Any]:
    """Train on this process's samples, in some other way than one pass per step."""
    model = model_of("dense")
    net: Any = model
    if size > 1:
        net = DistributedDataParallel(
            model, process_group=GROUPS[size], find_unused_parameters=variant == "unmeasured"
        )
    opt = kfac_of(net, **{**OPTIONS["clip"], "lr": 0.05, "statistics_every": 2, "invert_every": 4})
    rows = rows_of(rank, size)
    for number in range(6):
        x, y = batch(number, sum(COUNTS), "dense")
        opt.zero_grad()
        LOOPS[variant](Pass(net, model, rank, size, x[rows], y[rows]), opt)
        if variant != "skipped" or number != 4:
            opt.step()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()]), calls(opt)


@pytest.mark.parametrize("variant", LOOPS)
def test_other_loops_are_those_of_one_process(world: World, variant: str) -> None:
    (first, sent), *others = world.run(loop, variant)
    want, _ = loop(0, 1, variant)
    assert all(torch.equal(first, other) and sent == traffic for other, traffic in others)
    torch.testing.assert_close(first, want, rtol=1e-10, atol=1e-10)
    assert place().type != "cpu" or bool(torch.isfinite(first).all())


def pair(rank: int, size: int) -> Tensor:
    """Two optimizers whose sums begin in another order on the first process."""
    models = [model_of("dense"), model_of("convolutions")]
    nets: list[Any] = [*models]
    if size > 1:
        nets = [DistributedDataParallel(model) for model in models]
    options: dict[str, Any] = {**OPTIONS["clip"], "statistics_every": 2, "invert_every": 4}
    opts = [kfac_of(net, 0.05, **options) for net in nets]
    rows = rows_of(rank, size)
    for number in range(6):
        x, y = batch(number, sum(COUNTS), "dense")
        for opt in opts:
            opt.zero_grad()
        losses = [F.cross_entropy(net(x[rows]), y[rows], reduction="sum") for net in nets]
        outputs = models[0](x[rows]) if rank == 0 and size > 1 else None  # keeps statistics back
        for loss in losses:
            (loss / sum(COUNTS) * size).backward()
        del outputs
        for opt in opts:
            opt.step()
    return torch.cat([p.detach().flatten().cpu() for p in nn.ModuleList(models).parameters()])


def test_optimizers_do_not_wait_for_each_other(world: World) -> None:
    first, *others = world.run(pair)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, pair(0, 1), rtol=1e-10, atol=1e-10)


def begun(rank: int, size: int) -> Tensor:
    """Train with first eigenbases that are divided over several steps."""
    original = Eigenbasis.first_entries
    Eigenbasis.first_entries = 100
    try:
        return _eigenbasis_run(rank, size)
    finally:
        Eigenbasis.first_entries = original


def _eigenbasis_run(rank: int, size: int) -> Tensor:
    model = model_of("dense")
    net: Any = DistributedDataParallel(model) if size > 1 else model
    opt = pb.KFAC(net, rule="eigenbasis", statistics_every=1, invert_every=1)
    rows = rows_of(rank, size)
    for number in range(4):
        x, y = batch(number, sum(COUNTS), "dense")
        opt.zero_grad()
        loss = F.cross_entropy(net(x[rows]), y[rows], reduction="sum")
        (loss / sum(COUNTS) * size).backward()
        opt.step()
    ready = torch.tensor([float(len(opt.blocks.states.ready & opt.blocks.measured_keys))])
    return torch.cat([ready, *(p.detach().flatten().cpu() for p in model.parameters())])


def test_first_eigenbases_do_not_depend_on_the_number_of_processes(world: World) -> None:
    for result in world.run(begun):
        torch.testing.assert_close(result, begun(0, 1), rtol=1e-9, atol=1e-9)


def built(rank: int, size: int, metric: Any) -> None:
    net = DistributedDataParallel(model_of("dense"), process_group=GROUPS[size])
    kfac_of(net, 0.05, metric=metric)


def squares(z: Tensor) -> Tensor:
    return torch.eye(z.shape[-1], dtype=z.dtype).expand(len(z), -1, -1)


def test_metrics_that_relate_samples_are_refused_and_functions_are_not(world: World) -> None:
    for _, error in world.outcomes(built, pb.metrics.Sobolev()):
        assert "relates the samples of a batch" in str(error)
    world.run(built, squares)


def count_groups_around(rank: int, size: int, is_closed: bool) -> list[int]:
    """Return how many groups there are before training, after it, and after the optimizer's end."""
    net = DistributedDataParallel(model_of("dense"))
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    counts = [len(groups)]
    opt = kfac_of(net, lr=0.05, statistics_every=1, **OPTIONS["clip"])
    for number in range(3):
        x, y = batch(10 * number + rank, 8, "dense")
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    counts.append(len(groups))
    if is_closed:
        opt.close()
    else:
        del opt
        gc.collect()
    counts.append(len(groups))
    return counts


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "collected"])
def test_the_end_of_an_optimizer_gives_up_the_group_of_sums(world: World, is_closed: bool) -> None:
    for before, during, after in world.run(count_groups_around, is_closed):
        assert during == before + 1
        assert after == before
