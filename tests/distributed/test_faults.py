"""What goes wrong on one process is known to all: nobody waits, and replicas stay the same."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pullback as pb
from tests.kfac_options import kfac_of

from .training import batch, model_of
from .world import GONE, GROUPS, World

CATEGORICAL = pb.likelihoods.Categorical()


def wrap_model(
    size: int, model: nn.Module | None = None, group: Any = None, **options: Any
) -> tuple[Any, pb.KFAC]:
    if group is None:
        group = GROUPS[size]
    net = DistributedDataParallel(model or model_of("dense"), process_group=group)
    options = {"likelihood": CATEGORICAL, "statistics_every": 2, "invert_every": 2, **options}
    return net, kfac_of(net, 0.05, **options)


def step(net: Any, opt: pb.KFAC, number: int, rank: int, factor: float = 1.0) -> None:
    x, y = batch(10 * number + rank, 8, "dense")
    opt.zero_grad()
    F.cross_entropy(net(factor * x), y).backward()
    opt.step()


def vector(net: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(net.parameters()).detach().clone()


def not_finite(rank: int, size: int, options: dict[str, Any]) -> Any:
    net, opt = wrap_model(size, **options)
    observed = []
    for number in range(5):
        before = vector(net)
        step(net, opt, number, rank, torch.nan if rank == 1 and number in (0, 2) else 1.0)
        observed.append(
            (opt.info.accepted, torch.equal(before, vector(net)), opt.info.took_statistics)
        )
    return observed, vector(net)


RULES: dict[str, Any] = {
    "natural": {},
    "no clip": {"kl_clip": None},
    "eigenbasis": {"likelihood": None},
}


@pytest.mark.parametrize("rule", RULES)
def test_nan_on_one_process_is_a_rejected_step_on_all(world: World, rule: str) -> None:
    (reports, first), *others = world.run(not_finite, RULES[rule])
    assert [accepted for accepted, *_ in reports] == [False, True, False, True, True]
    assert [is_unchanged for _, is_unchanged, _ in reports] == [True, False, True, False, False]
    assert all(other == reports and torch.equal(first, p) for other, p in others)


def build_mismatched(rank: int, size: int, what: str) -> None:
    differing: dict[str, Any] = {"ema": 0.9} if what == "ema" and rank else {}
    if what == "model":
        wrap_model(size)  # DistributedDataParallel itself refuses other shapes
    net, opt = wrap_model(size, **differing)
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
    for error in world.errors(build_mismatched, what):
        assert error is not None
        assert all(word in error for word in ("PullbackError", *words)), error


def change_one_process(rank: int, size: int, at: int, what: str) -> Any:
    """Change a gradient or a parameter of one process, and go on to the next statistics."""
    model = model_of("dense")
    parameters = [
        p for n, p in model.named_parameters() if what != "not given" or n != "two.weight"
    ]
    net, opt = wrap_model(size, model, params=parameters)
    before = vector(net)
    try:
        for number in range(5):
            before = vector(net)
            x, y = batch(10 * number + rank, 8, "dense")
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            if number == at and rank == 1:
                weight = net.module.two.weight
                (weight.grad if what == "gradient" else weight.data)[3, 4] *= 1 + 1e-15
            opt.step()
    except pb.PullbackError as error:
        return number, str(error), torch.equal(before, vector(net))
    return None


@pytest.mark.parametrize(
    ("at", "what", "said"),
    [
        (2, "gradient", "differ in their gradients: that of two.weight"),
        (3, "gradient", "differ in their parameters: that of "),
        (3, "parameter", "differ in their parameters: that of "),
    ],
)
def test_replicas_do_not_drift_apart(world: World, at: int, what: str, said: str) -> None:
    """A change of one process alone, be it of the last bit, is known at the next statistics."""
    for number, error, is_equal in world.run(change_one_process, at, what):
        assert number == 2 * -(-at // 2)
        assert said in error
        assert "process 1" in error
        assert is_equal  # nothing has moved


def test_parameters_of_others_may_differ(world: World) -> None:
    assert world.run(change_one_process, 3, "not given") == [None] * 3


class Otherwise(nn.Module):
    """A linear layer whose weight this process may use outside of it as well."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.one = nn.Linear(6, 5)
        self.last = nn.Linear(5, 4)
        self.outside = outside

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(torch.tanh(self.one(x[:, 0])))
        if self.outside:
            return h * (1 + self.last.weight.sum())
        return h


def otherwise(rank: int, size: int) -> None:
    net, opt = wrap_model(size, Otherwise(rank == 1).double())
    step(net, opt, 0, rank)


def test_a_layer_that_one_process_sees_otherwise(world: World) -> None:
    for error in world.errors(otherwise):
        assert "The processes see 'last." in error, error
        assert "process 0 has a kronecker block" in error
        assert "and process 1 a " in error


class Failing(pb.optim.kfac.Tikhonov):
    """Fails on one process."""

    def find_shifts(self, means: Any, reference: Any, value: float) -> Any:
        if dist.get_rank() == 0:
            raise ValueError("no damping today")
        return super().find_shifts(means, reference, value)

    def __repr__(self) -> str:
        return "Failing()"


def fail_in_damping(rank: int, size: int) -> None:
    net, opt = wrap_model(size, damping=Failing(1e-3))
    step(net, opt, 0, rank)


def test_a_renewal_that_fails_on_one_process(world: World) -> None:
    first_error, *others = world.errors(fail_in_damping)
    assert first_error == "ValueError: no damping today"
    for error in others:
        assert "Process 0 could not refresh its blocks" in error, error
        assert "no damping today" in error


def untold(rank: int, size: int) -> None:
    pb.KFAC(model_of("dense"), 0.05)


def test_processes_that_nobody_told_of(world: World) -> None:
    for error in world.errors(untold):
        assert "3 processes" in error
        assert "DistributedDataParallel" in error
        assert "group=" in error


def step_of_an_older_one(rank: int, size: int, opt: pb.KFAC) -> None:
    x, y = batch(rank, 8, "dense")
    F.cross_entropy(opt.model(x), y).backward()
    opt.step()


def test_an_optimizer_that_is_older_than_the_processes(world: World) -> None:
    """It would train every replica by itself."""
    opt = kfac_of(model_of("dense"), 0.05, likelihood=CATEGORICAL)
    for error in world.errors(step_of_an_older_one, opt):
        assert "built before they met" in error


def indivisible(rank: int, size: int) -> None:
    wrap_model(size, workers=2)


def test_teams_have_one_size(world: World) -> None:
    assert all("workers=2 does not divide 3" in error for error in world.errors(indivisible))


def alone(rank: int, size: int) -> str:
    """State that is spread over processes, asked for by one of them."""
    net, opt = wrap_model(size, kl_clip=None, workers=1)
    for number in range(2):
        step(net, opt, number, rank)
    if rank == 0:
        with pytest.raises(pb.PullbackError, match="all processes together") as raised:
            opt.state_dict()
        return str(raised.value)
    time.sleep(8.0)
    return ""


@pytest.mark.slow
def test_state_that_one_process_asks_for() -> None:
    processes = World(2, seconds=5.0)
    try:
        said, _ = processes.run(alone)
    finally:
        processes.close()
    assert "did not hear from all processes" in said


def pickle_optimizer(rank: int, size: int) -> None:
    net, opt = wrap_model(size)
    step(net, opt, 0, rank)
    resumed = pickle.loads(pickle.dumps(opt))
    step(resumed.model, resumed, 1, rank)  # averages its gradients in the default group
    if rank < 2:
        net, opt = wrap_model(2)
        with pytest.raises(pb.PullbackError, match="part of the processes cannot be pickled"):
            pickle.dumps(opt)


def test_pickles_find_the_default_group_alone(world: World) -> None:
    world.run(pickle_optimizer)


def slow(rank: int, size: int) -> Tensor:
    net, opt = wrap_model(size)
    for number in range(3):
        time.sleep(0.3 if rank == 1 else 0.0)
        step(net, opt, number, rank)
    return vector(net)


def test_a_slow_process(world: World) -> None:
    first, *others = world.run(slow)
    assert all(torch.equal(first, p) for p in others)


class Deadly(pb.optim.kfac.Tikhonov):
    """Ends the process where it inverts, once it is told to."""

    armed = False

    def find_shifts(self, means: Any, reference: Any, value: float) -> Any:
        if Deadly.armed:
            die()
        return super().find_shifts(means, reference, value)

    def __repr__(self) -> str:
        return "Deadly()"


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


PHASES: dict[str, Any] = {
    "forward": lambda net, opt: net.module.two.register_forward_hook(die),
    "backward": lambda net, opt: net.module.two.weight.register_hook(die),
    "statistics": lambda net, opt: opt.register_step_pre_hook(die),
    "inversion": lambda net, opt: setattr(Deadly, "armed", True),
    "update": lambda net, opt: opt.register_step_post_hook(die),
}


def lost(rank: int, size: int) -> dict[str, Any]:
    """Train in pairs with the first process, one after the other; each partner is lost."""
    messages: dict[str, Any] = {}
    limit = timedelta(seconds=30)
    pairs = [dist.new_group([0, partner], timeout=limit) for partner in range(1, size)]
    for partner, (phase, pair) in enumerate(zip(PHASES, pairs, strict=True), 1):
        if rank not in (0, partner):
            continue
        net, opt = wrap_model(2, group=pair, damping=Deadly(1e-3))
        step(net, opt, 0, rank)
        step(net, opt, 1, rank)
        if rank:
            PHASES[phase](net, opt)
        messages[phase] = _go_on(net, opt, rank)
    return messages


def _go_on(net: Any, opt: pb.KFAC, rank: int) -> Any:
    """Return what was raised, and the seconds that it took."""
    start = time.monotonic()
    try:
        for number in range(2, 20):
            step(net, opt, number, rank)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


def test_a_lost_process_is_an_error_within_the_time_limit() -> None:
    processes = World(len(PHASES) + 1, seconds=30.0)
    try:
        (messages, error), *others = processes.outcomes(lost)
    finally:
        processes.close()
    assert error is None, messages
    assert messages.keys() == PHASES.keys()
    assert all(said and seconds < 30.0 for said, seconds in messages.values()), messages
    assert all(gone == GONE for _, gone in others)


def late(rank: int, size: int, phase: str) -> Any:
    net, opt = wrap_model(size)
    step(net, opt, 0, rank)
    step(net, opt, 1, rank)
    if rank == size - 1:
        opt.register_step_pre_hook(lambda *_: os.kill(os.getpid(), getattr(signal, phase)))
    return _go_on(net, opt, rank)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["SIGKILL", "SIGSTOP"])
def test_all_others_know_at_the_time_limit(phase: str) -> None:
    """Some of them wait for a process that is not lost itself; one that stands still is lost."""
    processes = World(4, seconds=10.0)
    try:
        *others, _ = processes.outcomes(late, phase, patience=30.0)
    finally:
        processes.close()
    for value, error in others:
        assert error is None
        assert value[0]
        assert value[1] < 20.0


# --- torchrun -------------------------------------------------------------------------------------

SCRIPT = """
import os, runpy, signal, sys
from torch import nn

folder, steps, fatal, example = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
calls = 0

def watch(module, inputs):
    global calls
    if isinstance(module, nn.parallel.DistributedDataParallel):
        calls += 1
        os.write(1, f"{os.environ['RANK']} step {calls}\\n".encode())
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1"
        if calls == fatal and first:
            os.kill(os.getpid(), signal.SIGKILL)

nn.modules.module.register_module_forward_pre_hook(watch)
runpy.run_path(example)["main"](folder, steps, 10)
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "kfac_torchrun.py"


def launch(folder: Path, steps: int, fatal: int, *options: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    arguments = [str(folder / "saved"), str(steps), str(fatal), str(EXAMPLE)]
    command = [*launcher, "--nproc-per-node", "2", *options, str(script), *arguments]
    # a store that outlives a restart still has the addresses of lost processes
    where = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=where, **pipe)


def weights(folder: Path, steps: int) -> Tensor:
    """Return the parameters of a checkpoint."""
    path = folder / "saved" / str(steps)
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    names = sorted(n for n in metadata if n.startswith("model."))
    state: dict[str, Any] = {n: torch.empty(metadata[n].size) for n in names}  # pyright: ignore
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return torch.cat([state[n].flatten() for n in names])


@pytest.mark.slow
def test_torchrun_restarts_and_goes_on(tmp_path: Path) -> None:
    """A process is lost in step 25, and the run ends where an unbroken one does."""
    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    for folder, options in ((whole, (0,)), (broken, (25, "--max-restarts", "1"))):
        run = launch(folder, 40, *options)
        said = run.communicate(timeout=300)[0]
        assert run.returncode == 0, said
    first, second = said.split("exitcode: -9")
    assert "0 step 24" in first
    assert "0 step 20" in second  # it went on from the twentieth
    assert "0 step 21" not in second
    assert torch.equal(weights(whole, 40), weights(broken, 40))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_is_interrupted(tmp_path: Path, number: int) -> None:
    """Ctrl-C ends all processes; another run goes on from the last checkpoint."""
    with launch(tmp_path, 100_000, 0) as run:
        assert run.stdout is not None
        assert any(line == "0 step 15\n" for line in run.stdout)
        run.send_signal(number)
        start = time.monotonic()
        for _ in run.stdout:
            pass
        assert run.wait(60) != 0
        assert time.monotonic() - start < 25  # torchrun kills after 30 seconds
    last = max(int(path.parent.name) for path in (tmp_path / "saved").glob("*/.metadata"))
    repeated = launch(tmp_path, last + 2, 0)
    said = repeated.communicate(timeout=300)[0]
    assert repeated.returncode == 0, said
    assert "0 step 2\n" in said
    assert "0 step 3\n" not in said
