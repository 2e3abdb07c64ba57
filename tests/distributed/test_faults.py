"""What goes wrong on one process is known to all: nobody waits, and replicas stay the same."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pullback as pb

from .training import batch, model_of
from .world import GROUPS, World

CATEGORICAL = pb.likelihoods.Categorical()


def wrapped(size: int, model: nn.Module | None = None, **options: Any) -> tuple[Any, pb.KFAC]:
    net = DistributedDataParallel(model or model_of("dense"), process_group=GROUPS[size])
    options = {"likelihood": CATEGORICAL, "statistics_every": 2, "invert_every": 2, **options}
    return net, pb.KFAC(net, 0.05, **options)


def step(net: Any, opt: pb.KFAC, number: int, rank: int, factor: float = 1.0) -> None:
    x, y = batch(10 * number + rank, 8, "dense")
    opt.zero_grad()
    F.cross_entropy(net(factor * x), y).backward()
    opt.step()


def vector(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def not_finite(rank: int, size: int, options: dict[str, Any]) -> Any:
    net, opt = wrapped(size, **options)
    seen = []
    for number in range(5):
        before = vector(net)
        step(net, opt, number, rank, torch.nan if rank == 1 and number in (0, 2) else 1.0)
        seen.append((opt.info.accepted, torch.equal(before, vector(net)), opt.info.taken))
    return seen, vector(net)


RULES: dict[str, Any] = {
    "natural": {},
    "no clip": {"kl_clip": None},
    "eigenbasis": {"likelihood": None},
}


@pytest.mark.parametrize("rule", RULES)
def test_nan_on_one_process_is_a_rejected_step_on_all(world: World, rule: str) -> None:
    (seen, first), *rest = world.run(not_finite, RULES[rule])
    assert [accepted for accepted, *_ in seen] == [False, True, False, True, True]
    assert [same for _, same, _ in seen] == [True, False, True, False, False]
    assert all(other == seen and torch.equal(first, p) for other, p in rest)


def mismatched(rank: int, size: int, what: str) -> None:
    own: dict[str, Any] = {"ema": 0.9} if what == "ema" and rank else {}
    if what == "model":
        wrapped(size)  # DistributedDataParallel itself refuses other shapes
    net, opt = wrapped(size, **own)
    step(net, opt, 0, rank)
    step(net, opt, 1, rank)
    if what == "weight decay" and rank == 1:
        opt.param_groups[0]["weight_decay"] = 0.1
    if what == "gradient":
        x, y = batch(rank, 8, "dense")
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if rank == 2:
            net.module.two.bias.grad = None
        opt.step()
    step(net, opt, 2, rank)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ema", ("The processes differ in the options of KFAC", "ema is 0.95 on process 0")),
        ("weight decay", ("weight_decay of param group 0 is 0.0", "0.1 on process 1")),
        ("gradient", ("their gradients", "two.bias", "process 2", "find_unused_parameters")),
    ],
)
def test_what_differs_is_said_on_all(world: World, what: str, words: tuple[str, ...]) -> None:
    for error in world.errors(mismatched, what):
        assert error is not None
        assert all(word in error for word in ("PullbackError", *words)), error


class Otherwise(nn.Module):
    """A linear layer whose weight this process may use outside of it as well."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.one, self.last, self.outside = nn.Linear(6, 5), nn.Linear(5, 4), outside

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(torch.tanh(self.one(x[:, 0])))
        return h * (1 + self.last.weight.sum()) if self.outside else h


def otherwise(rank: int, size: int) -> None:
    net, opt = wrapped(size, Otherwise(rank == 1).double())
    step(net, opt, 0, rank)


def test_a_layer_that_one_process_sees_otherwise(world: World) -> None:
    for error in world.errors(otherwise):
        assert "The processes see 'last." in error, error
        assert "process 0 has a kronecker block" in error
        assert "and process 1 a " in error


class Failing(pb.optim.kfac.Tikhonov):
    """Fails on one process."""

    def added(self, means: Any, reference: Any, value: float) -> Any:
        if dist.get_rank() == 0:
            raise ValueError("no damping today")
        return super().added(means, reference, value)

    def __repr__(self) -> str:
        return "Failing()"


def failing(rank: int, size: int) -> None:
    net, opt = wrapped(size, damping=Failing(1e-3))
    step(net, opt, 0, rank)


def test_a_renewal_that_fails_on_one_process(world: World) -> None:
    for error in world.errors(failing):
        assert "Process 0 could not renew its inverses" in error, error
        assert "no damping today" in error


def untold(rank: int, size: int) -> None:
    pb.KFAC(model_of("dense"), 0.05)


def test_processes_that_nobody_told_of(world: World) -> None:
    for error in world.errors(untold):
        assert "3 processes" in error
        assert "DistributedDataParallel" in error
        assert "group=" in error


def indivisible(rank: int, size: int) -> None:
    wrapped(size, workers=2)


def test_teams_have_one_size(world: World) -> None:
    assert all("workers=2 does not divide 3" in error for error in world.errors(indivisible))


def slow(rank: int, size: int) -> Tensor:
    net, opt = wrapped(size)
    for number in range(3):
        time.sleep(0.3 if rank == 1 else 0.0)
        step(net, opt, number, rank)
    return vector(net)


def test_a_slow_process(world: World) -> None:
    first, *rest = world.run(slow)
    assert all(torch.equal(first, p) for p in rest)


def lost(rank: int, size: int, phase: str) -> Any:
    net, opt = wrapped(size)
    step(net, opt, 0, rank)
    start = time.monotonic()
    try:
        for number in range(1, 20):
            if rank == 1 and number == 2:
                if phase == "statistics":
                    x, y = batch(number, 8, "dense")
                    F.cross_entropy(net(x), y).backward()
                os.kill(os.getpid(), signal.SIGKILL)
            step(net, opt, number, rank)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("phase", ["backward", "statistics"])
def test_a_lost_process_is_an_error_within_the_time_limit(phase: str) -> None:
    own = World(2, seconds=10.0)
    try:
        (value, error), (_, gone) = own.outcomes(lost, phase)
    finally:
        own.close()
    assert error is None
    assert value[0] != "no error"
    assert value[1] < 30.0
    assert gone == "the process is gone"
