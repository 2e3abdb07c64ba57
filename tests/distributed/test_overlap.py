"""Statistics are summed over processes while the backward pass goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
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
    sent = [
        inverting,
        inverting,
        often,
        inverting,
    ]  # inversions follow the first three, and the fifth
    assert first[1:] == [[(1, 0), (often, n - often)] for n in sent]


def loop(rank: int, size: int, variant: str) -> tuple[Tensor, Any]:
    """Train on this process's samples, in some other way than one pass per step."""
    model = model_of("dense")
    net: Any = model
    if size > 1:
        net = DistributedDataParallel(
            model, process_group=GROUPS[size], find_unused_parameters=variant == "unmeasured"
        )
    opt = kfac_of(net, **{**OPTIONS["clip"], "lr": 0.05, "statistics_every": 2, "invert_every": 4})

    def loss_of(x: Tensor, y: Tensor, count: int) -> Tensor:
        return F.cross_entropy(net(x), y, reduction="sum") / count * size

    for number in range(8):
        x, y = batch(number, sum(COUNTS), "dense")
        if size > 1:
            rows = share(COUNTS, rank)
        else:
            rows = slice(None)
        x = x[rows]
        y = y[rows]
        count = sum(COUNTS)
        opt.zero_grad()
        if variant == "dropped":
            loss_of(x.flip(0), y, count).backward()
            opt.zero_grad()
        if variant == "unmeasured" and rank == 2:  # its samples count for nothing
            net(x)
            sum(p.sum() * 0 for p in model.parameters()).backward()  # pyright: ignore
        elif variant == "unmeasured":
            if size == 1:
                selected = slice(COUNTS[0] + COUNTS[1])
            else:
                selected = slice(None)
            loss_of(x[selected], y[selected], count).backward()
        elif variant in ("two passes", "two calls"):
            pieces = list(zip(x.chunk(2), y.chunk(2), strict=True))
            if variant == "two passes":
                for selected, target in pieces:
                    loss_of(selected, target, count).backward()
            else:
                one, two = (loss_of(selected, target, count) for selected, target in pieces)
                (one + two).backward()
        else:
            loss = loss_of(x, y, count)
            # a pass that stays open keeps statistics back until `step`, on one process alone
            if variant == "skipped" and rank == 0:
                outputs = model(x)
            else:
                outputs = None
            loss.backward()
            del outputs
        if variant != "skipped" or number != 4:
            opt.step()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()]), calls(opt)


@pytest.mark.parametrize("variant", ["dropped", "skipped", "two passes", "two calls", "unmeasured"])
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
    for number in range(6):
        x, y = batch(number, sum(COUNTS), "dense")
        if size > 1:
            rows = share(COUNTS, rank)
        else:
            rows = slice(None)
        for opt in opts:
            opt.zero_grad()
        losses = [F.cross_entropy(net(x[rows]), y[rows], reduction="sum") for net in nets]
        # keeps statistics back
        if rank == 0 and size > 1:
            outputs = models[0](x[rows])
        else:
            outputs = None
        for loss in losses:
            (loss / sum(COUNTS) * size).backward()
        del outputs
        for opt in opts:
            opt.step()
    return torch.cat([p.detach().flatten().cpu() for m in models for p in m.parameters()])


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
    for number in range(4):
        x, y = batch(number, sum(COUNTS), "dense")
        if size > 1:
            rows = share(COUNTS, rank)
        else:
            rows = slice(None)
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
