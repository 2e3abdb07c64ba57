"""K-FAC on N processes is K-FAC of one process on the joined batch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pullback as pb
from pullback_experiments.benchmarks.traffic import count, take_first_step
from tests.kfac_options import kfac_of

from .training import FEW, MODELS, STEPS, batch, model_of, train
from .world import World, place

CATEGORICAL = pb.likelihoods.Categorical()
NATURAL: dict[str, Any] = {"likelihood": CATEGORICAL, "fisher": "exact"}
UNEVEN = (15, 8, 13)


#: a loop that is not compared with one process
Result = tuple[Tensor, dict[str, Any]]


def check_processes(
    world: World,
    model_name: str,
    options: dict[str, Any],
    counts: tuple[int, ...] = UNEVEN,
    **how: Any,
) -> None:
    """The processes' parameters are the same bits, and those of one process to round-off."""
    results = world.run(_train, model_name, counts, options, how, size=len(counts))
    want = train(0, 1, model_name, counts, options, **how)
    for name, p in want.items():
        for other in results[1:]:
            assert torch.equal(results[0][name], other[name]), name
        torch.testing.assert_close(results[0][name], p, rtol=1e-10, atol=1e-10)


def _train(
    rank: int, size: int, model_name: str, counts: Any, options: Any, how: dict[str, Any]
) -> dict[str, torch.Tensor]:
    return train(rank, size, model_name, counts, options, **how)


def quick(names: Iterable[str], *slow_names: str) -> list[Any]:
    """Parametrize with the names; those that send what others send too are slow."""
    return [pytest.param(n, marks=pytest.mark.slow if n in slow_names else ()) for n in names]


@pytest.mark.parametrize("model_name", quick(MODELS, "recurrence", "small", "large head"))
def test_layers(world: World, model_name: str) -> None:
    check_processes(world, model_name, NATURAL, steps=FEW)


OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {**NATURAL, "kl_clip": 1e-3},
    "clip between inversions": {**NATURAL, "statistics_every": 1, "invert_every": 8},
    "no clip": {**NATURAL, "kl_clip": None},
    "every step": {**NATURAL, "kl_clip": None, "statistics_every": 1, "invert_every": 1},
    "exact damping": {**NATURAL, "damping": pb.optim.kfac.Exact(1e-2)},
    "invariant damping": {**NATURAL, "damping": pb.optim.kfac.Invariant(1e-2)},
    "no damping": {**NATURAL, "damping": 0.0, "kl_clip": 1e-3},
    "adaptive damping": {**NATURAL, "damping": pb.optim.kfac.Adaptive(1e-2), "lr": 0.5},
    "quadratic model": {**NATURAL, "step": pb.steps.QuadraticModel(), "lr": 1.0},
    "empirical": {"likelihood": CATEGORICAL, "fisher": "empirical"},
    "ekfac": {**NATURAL, "ekfac": True},
    "apart": {**NATURAL, "joint": False, "kl_clip": None},
    "diagonals": {**NATURAL, "max_factor": 10, "kl_clip": None},
    "reduce": {**NATURAL, "sharing": "reduce"},
    "eigenbasis": {"rule": "eigenbasis", "lr": 3e-3},
    "spectral": {"rule": "spectral", "lr": 6e-3, "ema": 0.8},
    "two-sided": {"rule": "two-sided", "lr": 6e-3, "ema": 0.8},
    "decay": {**NATURAL, "weight_decay": 0.1, "momentum": 0.5},
}


#: whose state is carried over steps without inversions; of the others one cycle tells as much
LONG_RUNS = {"clip", "clip between inversions", "ekfac", "eigenbasis", "spectral"}


#: what these change is computed by each process alone
LOCAL = ("no clip", "exact damping", "no damping", "apart", "reduce", "decay")


@pytest.mark.parametrize("name", quick(OPTIONS, *LOCAL))
def test_options(world: World, name: str) -> None:
    if name in ("no damping", "invariant damping"):  # which magnify round-off
        check_processes(world, "small", OPTIONS[name], steps=4)
    else:
        check_processes(world, "dense", OPTIONS[name], steps=STEPS if name in LONG_RUNS else FEW)


def test_invariant_damping_of_recurrent_layers(world: World) -> None:
    """With the usual clip the first step is as long as 74, and steps then magnify round-off.

    One process on samples in another order then differs as much from itself.
    """
    check_processes(world, "waves", {**OPTIONS["invariant damping"], "kl_clip": 1e-5}, steps=FEW)


@pytest.mark.parametrize(
    "name", quick(["clip", "no clip", "eigenbasis", "spectral"], "no clip", "spectral")
)
def test_workers(world: World, name: str) -> None:
    """One process for each inverse; the others receive directions."""
    check_processes(world, "convolutions", {**OPTIONS[name], "workers": 1}, steps=FEW)


@pytest.mark.parametrize(
    "model_name", quick(["convolutions", "experts", "tied"], "convolutions", "tied")
)
def test_clips_between_inversions(world: World, model_name: str) -> None:
    """Processes hold shares of averages, and xᵀF̂x is the sum of what these give."""
    options = {**OPTIONS["clip between inversions"], "kl_clip": 1e-4}
    check_processes(world, model_name, options, steps=FEW)


def test_empty_batches(world: World) -> None:
    check_processes(world, "dense", OPTIONS["no clip"], (20, 0, 15), steps=FEW)
    check_processes(world, "convolutions", OPTIONS["clip"], (0, 20, 15), steps=FEW)


@pytest.mark.parametrize("name", ["adaptive damping", "quadratic model"])
def test_controlled_steps_with_an_empty_batch(world: World, name: str) -> None:
    check_processes(world, "dense", OPTIONS[name], (20, 0, 15), steps=FEW)


def test_accumulation(world: World) -> None:
    check_processes(world, "dense", OPTIONS["clip"], (14, 16, 6), micro=2, steps=FEW)


def test_clipped_gradients(world: World) -> None:
    check_processes(world, "dense", OPTIONS["clip"], clip=0.1, steps=FEW)


def test_plain_module(world: World) -> None:
    """With `group=` the optimizer averages the gradients itself."""
    check_processes(world, "dense", OPTIONS["clip"], plain=True, steps=FEW)
    check_processes(world, "experts", OPTIONS["clip"], plain=True, steps=FEW)


@pytest.mark.parametrize(
    "name",
    quick(["clip", "no clip", "one worker", "eigenbasis", "spectral"], "no clip", "eigenbasis"),
)
def test_checkpoints(world: World, tmp_path: Path, name: str) -> None:
    """Saved by two processes, a run goes on with three or with one as if nothing had happened."""
    options = {**OPTIONS.get(name, OPTIONS["eigenbasis"])}
    if name == "one worker":
        options["workers"] = 1
    how = {"save": str(tmp_path / "two"), "steps": 3}
    world.run(_train, "convolutions", (20, 16), options, how, size=2)
    want = train(0, 1, "convolutions", (36,), {**options, "workers": None}, FEW)
    how = {"load": str(tmp_path / "two"), "start": 3, "steps": FEW}
    results = world.run(_train, "convolutions", UNEVEN, options, how)
    results.append(train(0, 1, "convolutions", (36,), {**options, "workers": None}, **how))
    for parameter, p in want.items():
        for other in results:
            torch.testing.assert_close(other[parameter], p, rtol=1e-10, atol=1e-10)


def _loop(rank: int, size: int, model_name: str) -> Result:
    """A plain loop in float32 on batches of its own, with what people put around a model."""
    model: Any = model_of("dense").float()
    scaler = torch.amp.GradScaler(place().type, enabled=model_name == "scaler")
    if model_name == "compiled inside":
        net: Any = DistributedDataParallel(torch.compile(model, backend="eager"))
    elif model_name == "compiled outside":
        net = torch.compile(DistributedDataParallel(model), backend="eager")
    else:
        net = DistributedDataParallel(model)
    if model_name == "built before":
        options_used = {"group": torch.distributed.group.WORLD}
    else:
        options_used = {}
    options: dict[str, Any] = {"statistics_every": 2, "invert_every": 4, **options_used}
    if model_name == "eigenbasis":
        opt = kfac_of(net, **options)
    else:
        fisher = "empirical" if model_name == "scaler" else "mc"
        if model_name == "scaler":
            scaled = {"grad_scaler": scaler}
        else:
            scaled = {}
        options |= {"likelihood": CATEGORICAL, "fisher": fisher, **scaled}
        opt = kfac_of(model if options_used else net, 0.05, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 3)
    for step in range(6):
        x, y = batch(10 * step + rank, 8, "dense")
        opt.zero_grad()
        loss = F.cross_entropy(net(x.float()), y)
        scaler.scale(loss).backward()
        if model_name == "scaler":
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        scheduler.step()
    sent = {what: (t.calls, t.bytes) for what, t in opt.traffic().items()}
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu(), sent


@pytest.mark.parametrize(
    "model_name",
    quick(
        ["plain", "eigenbasis", "scaler", "compiled inside", "compiled outside", "built before"],
        "eigenbasis",
        "compiled inside",
    ),
)
def test_replicas_are_equal_to_the_bit(world: World, model_name: str) -> None:
    (first, sent), *others = world.run(_loop, model_name)
    assert bool(torch.isfinite(first).all())
    assert all(torch.equal(first, p) and sent == other for p, other in others)
    if model_name == "built before":  # the wrapper that calls the model averages its gradients
        assert "gradients" not in sent


def _clip_gradients(rank: int, size: int, samples: int) -> tuple[Any, Any]:
    """A model that is not wrapped, clipped after its gradients were averaged."""
    model: Any = model_of("dense")
    group = torch.distributed.group.WORLD if size > 1 else None
    opt = pb.KFAC(model, 0.05, rule="eigenbasis", statistics_every=2, invert_every=2, group=group)
    share = slice(rank * samples // size, (rank + 1) * samples // size)
    for step in range(4):
        x, y = batch(step, samples, "dense")
        opt.zero_grad()
        F.cross_entropy(model(x[share]), y[share]).backward()
        opt.average_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
    sent = {what: t.calls for what, t in opt.traffic().items()}
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu(), sent


def test_gradients_are_averaged_before_they_are_clipped(world: World) -> None:
    single, _ = _clip_gradients(0, 1, 36)
    for parameters, sent in world.run(_clip_gradients, 36):
        torch.testing.assert_close(parameters, single, rtol=1e-9, atol=1e-9)
        assert sent["gradients"] == 4  # not once more in step()


def test_traffic(world: World) -> None:
    """Triangles of all sides are sent with statistics."""
    (_, sent), *_ = world.run(_loop, "plain")
    calls, size = sent["factors"]
    sides = [(6, 20), (20, 17), (17, 4)]
    packed_sizes = [n * (n + 1) // 2 if n >= 16 else n * n for pair in sides for n in pair]
    means = [columns for columns, _ in sides]
    assert calls == 3
    assert size == pytest.approx(3 * 4 * (sum(packed_sizes) + sum(means)) * 2 * 2 / 3)
    assert sent["counts"][0] == 3
    assert sent["inverses"][0] == 3  # the first, second and third statistics
    schedule: dict[str, Any] = {"statistics_every": 2, "invert_every": 2}
    model = model_of("dense").float()
    inputs, _ = batch(0, 8, "dense")
    opt = take_first_step(model, inputs.float(), {"likelihood": CATEGORICAL, **schedule})
    paper, *_ = count(model, opt, 3, 3)
    assert sent["factors"][1] == pytest.approx(3 * 2 * paper["factors"])
    assert sent["inverses"][1] == pytest.approx(3 * 2 * paper["inverses"])


def test_moments_are_sent_with_their_bases(world: World) -> None:
    """The owner of the middle layer has most: it turns moments when it turns bases."""
    (_, sent), *_ = world.run(_loop, "eigenbasis")
    calls, size = sent["inverses"]
    assert calls == 3
    assert size == pytest.approx(3 * 2 * 4 * (20**2 + 17**2 + 2 * 20 * 17), rel=0.01)


def _memory(rank: int, size: int) -> Any:
    net = DistributedDataParallel(model_of("dense"))
    bytes_held = []
    for workers in (None, 1):
        opt = kfac_of(net, 0.05, likelihood=CATEGORICAL, workers=workers)
        x, y = batch(rank, 8, "dense")
        F.cross_entropy(net(x), y).backward()
        opt.step()
        bytes_held.append(opt.memory()["states"])
        opt.close()
    return bytes_held


def test_memory(world: World) -> None:
    """With one worker the inverses are held once, by all processes together."""
    shared_bytes, single_bytes = zip(*world.run(_memory), strict=True)
    assert len({*shared_bytes}) == 1
    assert sum(single_bytes) == shared_bytes[0]
