"""Directions from a CUDA graph: which steps and blocks have them, and that they are the eager ones.

Without a GPU a "graph" is the captured function itself, run again at each replay.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import AdamW, Eigenbasis, Spectral, direction_graph
from pullback.optim.kfac.direction_graph import DirectionGraph

HAS_CUDA = torch.cuda.is_available()
#: with a short memory steps along tiny gradients follow their round-off
RULES = {
    "spectral": Spectral,
    "gentle": partial(Spectral, gentle_start=True),
    "eigenbasis": partial(Eigenbasis, (0.7, 0.99)),
}
#: a change of the order of additions on a CPU
ROUND_OFF = 1e-5


class Counts:
    """How often graphs were captured and replayed."""

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Count captures and replays; on a CPU let the graph be the function itself."""
    counts = Counts()
    capture = direction_graph.capture_graph
    directions = DirectionGraph.directions

    def count_capture(compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
        counts.captures += 1
        run = compute
        if device.type == "cuda":
            run = capture(compute, device)

        def replay() -> None:
            counts.replays += 1
            run()

        return replay

    def always_defer(self: DirectionGraph, gradients: Any, is_void: Tensor | None) -> Any:
        first = next(iter(gradients.values()))
        if not first.is_cuda:
            is_void = torch.zeros(())
        return directions(self, gradients, is_void)

    monkeypatch.setattr(direction_graph, "capture_graph", count_capture)
    monkeypatch.setattr(DirectionGraph, "directions", always_defer)
    return counts


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not HAS_CUDA:
        pytest.skip("no CUDA device")
    return torch.device(request.param)


def make_network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8),
        nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3),
    )  # fmt: skip
    return model.to(device)


def train(
    optimizer: pb.KFAC,
    model: nn.Module,
    steps: range,
    between: Callable[[int], None] = lambda i: None,
) -> None:
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 1, 6, 6, generator=generator).to(device)
    y = torch.randint(0, 3, (64,), generator=generator).to(device)
    for i in steps:
        between(i)
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def without_graph(run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run something eagerly."""
    with monkeypatch.context() as patch:
        patch.setattr(direction_graph, "can_capture", lambda stack: False)
        return run()


@pytest.mark.parametrize("name", RULES)
def test_thirty_steps_are_the_eager_ones(
    name: str, device: torch.device, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a schedule of rates, decay, a weight that is frozen for a while, and a resumed state.

    On a GPU two eager runs differ too, by the order of additions in passes: that is allowed for.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    def run() -> Tensor:
        model = make_network(device)
        layer: Any = model[7]
        options: Any = {"weight_decay": 0.1, "statistics_every": 10, "invert_every": 20}
        optimizer = pb.KFAC(model, 1e-3, rule=RULES[name](cuda_graph=True), **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)

        def change(i: int) -> None:
            if i:
                schedule.step()
            layer.weight.requires_grad_(not 12 <= i < 17)
            if i == 24:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        train(optimizer, model, range(30), change)
        return vector(model)

    want = without_graph(run, monkeypatch)
    repeated = without_graph(run, monkeypatch)
    assert counts.captures == 0
    actual = run()
    assert counts.captures >= 3  # at first, with a frozen weight, and again
    assert counts.replays >= 12
    noise = float((repeated - want).abs().max())
    torch.testing.assert_close(actual, want, rtol=0, atol=ROUND_OFF + 3 * noise)


def test_a_graph_gives_the_same_with_an_option_that_changes(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Tensor:
        model = make_network(torch.device("cpu"))
        rule = Spectral(cuda_graph=True)
        optimizer = pb.KFAC(model, 5e-4, rule=rule)

        def change(i: int) -> None:
            if i == 8:
                rule.momentum = 0.5

        train(optimizer, model, range(16), change)
        return vector(model)

    want = without_graph(run, monkeypatch)
    actual = run()
    assert counts.captures == 2
    torch.testing.assert_close(actual, want, rtol=0, atol=ROUND_OFF)


def test_a_refused_capture_lets_steps_run_eagerly(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    def run() -> Tensor:
        model = make_network(torch.device("cpu"))
        train(pb.KFAC(model, 1e-3, rule=Spectral(cuda_graph=True)), model, range(8))
        return vector(model)

    want = without_graph(run, monkeypatch)
    monkeypatch.setattr(direction_graph, "capture_graph", refuse)
    with pytest.warns(UserWarning, match="runs without one: operation not permitted") as caught:
        actual = run()
    assert len([w for w in caught if "CUDA graph" in str(w.message)]) == 1
    torch.testing.assert_close(actual, want)


class OwnSpectral(Spectral):
    """A subclass, whose direction may do what a graph cannot hold."""


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        (Spectral(cuda_graph=False), torch.float32),
        (OwnSpectral(), torch.float32),
        (AdamW(), torch.float32),
        (Spectral(cuda_graph=True), torch.float64),
    ],
)
def test_what_is_not_captured(rule: Any, dtype: torch.dtype, counts: Counts) -> None:
    """What does not ask for it, a subclass, and float64."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2)).to(dtype)
    optimizer = pb.KFAC(model, 1e-3, rule=rule)
    x = torch.randn(9, 3, dtype=dtype)
    for _ in range(6):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert counts.captures == 0


def test_large_stacks_are_not_captured(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(direction_graph._LIMITS, entries=70)
    monkeypatch.setattr(direction_graph, "_LIMITS", limits)
    model = make_network(torch.device("cpu"))
    optimizer = pb.KFAC(model, 1e-3, rule=Spectral(cuda_graph=True))
    train(optimizer, model, range(6))
    graph = optimizer._curvature.states._graph
    assert graph._captured is not None
    assert graph._captured._buffers.keys() == {"0.weight"}  # 36 entries; others have 128 and more


def test_gradients_that_come_and_go_are_captured_a_few_times(counts: Counts) -> None:
    """A capture takes as long as several steps, so that many would cost more than they save."""
    model = make_network(torch.device("cpu"))
    optimizer = pb.KFAC(model, 1e-3)
    train(optimizer, model, range(8))
    assert counts.captures == 1
    for phase in range(8):
        for p in model[0].parameters():
            p.requires_grad_(phase % 2 == 1)
        train(optimizer, model, range(6))
    assert counts.captures == direction_graph._LIMITS.most_captures


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("name", RULES)
def test_gradients_that_are_not_finite_change_nothing_after_a_replay(
    name: str, counts: Counts
) -> None:
    device = torch.device("cuda")
    model = make_network(device)
    optimizer = pb.KFAC(model, 1e-3, rule=RULES[name](cuda_graph=True))
    train(optimizer, model, range(8))
    assert counts.replays
    replays = counts.replays
    before = vector(model).clone()
    moments = [t.clone() for t in _moments(optimizer)]
    optimizer.zero_grad()
    x = torch.randn(8, 1, 6, 6, device=device)
    (torch.inf * model(x).sum()).backward()
    optimizer.step()
    assert counts.replays == replays + 1
    assert torch.equal(vector(model), before)
    assert all(map(torch.equal, _moments(optimizer), moments))
    with pytest.warns(RuntimeWarning, match="not finite"):
        assert not optimizer.info.accepted


def _moments(optimizer: pb.KFAC) -> list[Tensor]:
    moments: list[Tensor] = []
    for block in optimizer._curvature.states.blocks.values():
        moments += block.state.tensors().values()
    return moments


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_a_replayed_step_launches_few_kernels(counts: Counts) -> None:
    """And other threads may use the device while it is captured."""
    device = torch.device("cuda")
    model = make_network(device)
    optimizer = pb.KFAC(model, 1e-3, rule=Spectral(cuda_graph=True), statistics_every=1000)
    train(optimizer, model, range(8))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        optimizer.step()
        torch.cuda.synchronize()
    launches = [e for e in trace.events() or [] if e.name.startswith("cudaLaunchKernel")]
    assert counts.replays
    assert len(launches) < 60
