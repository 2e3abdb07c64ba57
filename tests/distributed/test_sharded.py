"""K-FAC of a model that `fully_shard` has cut into pieces, uneven and empty ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pullback as pb
from pullback._core.shards import get_local_piece, is_sharded
from pullback.optim.kfac import Spectral
from tests.kfac_options import kfac_of

from .test_kfac import OPTIONS, quick
from .training import FEW, IGNORED, STEPS, batch, load, model_of, save, share, train
from .world import GROUPS, World, place

COUNTS = (15, 8, 13)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    processes = World(4)
    yield processes
    processes.close()


def shard_model(model_name: str, size: int, **options: Any) -> Any:
    """Every layer by itself, and the rest with the root; four processes are two pairs."""
    model = model_of(model_name)
    if size == 4:
        mesh = init_device_mesh(place().type, (2, 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = DeviceMesh.from_group(GROUPS[size], place().type)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(net: Any) -> dict[str, Tensor]:
    return {n: p.full_tensor().detach().cpu() for n, p in net.named_parameters()}


def run(
    rank: int,
    size: int,
    model_name: str,
    counts: tuple[int, ...],
    options: dict[str, Any],
    how: dict[str, Any],
) -> dict[str, Tensor]:
    net = shard_model(model_name, size, **how.get("policy", {}))
    opt = optimizer(net, options)
    if path := how.get("load"):
        load(net, opt, path, size)
    advance(net, opt, model_name, counts, rank, range(how.get("start", 0), how.get("steps", STEPS)))
    if path := how.get("save"):
        save(net, opt, path, size)
    return whole(net)


def optimizer(net: Any, options: dict[str, Any]) -> pb.KFAC:
    options_used: dict[str, Any] = {"lr": 0.05, "statistics_every": 2, "invert_every": 4, **options}
    return kfac_of(net, **options_used)


def advance(
    net: Any, opt: pb.KFAC, model_name: str, counts: tuple[int, ...], rank: int, steps: range
) -> None:
    """Train on this process's samples."""
    for step in steps:
        x, y = batch(step, sum(counts), model_name)
        total = (y != IGNORED).sum()
        rows = share(counts, rank)
        opt.zero_grad()
        z = net(x[rows]).flatten(0, -2)
        loss = F.cross_entropy(z, y[rows].flatten(), reduction="sum") / total
        (loss * len(counts)).backward()
        opt.step()


def check_processes(
    world: World,
    model_name: str,
    options: dict[str, Any],
    counts: tuple[int, ...] = COUNTS,
    **how: Any,
) -> None:
    results = world.run(run, model_name, counts, options, how, size=len(counts))
    steps = how.get("steps", STEPS)
    want = train(0, 1, model_name, counts, {**options, "workers": None}, steps)
    for name, p in want.items():
        for other in results[1:]:
            assert torch.equal(results[0][name], other[name]), name
        torch.testing.assert_close(results[0][name], p, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "model_name",
    quick(["dense", "convolutions", "attention", "recurrence"], "convolutions", "recurrence"),
)
def test_layers(world: World, model_name: str) -> None:
    check_processes(world, model_name, OPTIONS["clip"], steps=7 if model_name == "dense" else FEW)


@pytest.mark.parametrize(
    "name",
    quick(
        ["no clip", "ekfac", "eigenbasis", "spectral", "empirical"],
        "no clip",
        "spectral",
        "empirical",
    ),
)
def test_options(world: World, name: str) -> None:
    check_processes(world, "dense", OPTIONS[name], steps=FEW)


@pytest.mark.parametrize("model_name", quick(["large head", "convolutions"], "convolutions"))
def test_steps_of_large_weights_and_of_filters(world: World, model_name: str) -> None:
    """Sizes are those of whole weights, and a filter before a norm is one in every process."""
    options = {"rule": Spectral(head=True, gentle_start=True), "lr": 6e-3}
    check_processes(world, model_name, options, steps=FEW)


def test_kept_whole_after_the_forward_pass(world: World) -> None:
    check_processes(
        world, "dense", OPTIONS["clip"], policy={"reshard_after_forward": False}, steps=3
    )


def test_replicas_of_shards(world: World) -> None:
    counts = (10, 8, 11, 7)
    check_processes(world, "dense", OPTIONS["clip"], counts, steps=FEW)
    options = {**OPTIONS["eigenbasis"], "workers": 2}
    check_processes(world, "convolutions", options, counts, steps=FEW)


def test_workers_and_empty_batches(world: World) -> None:
    check_processes(world, "dense", {**OPTIONS["clip"], "workers": 1}, (20, 0, 16), steps=FEW)


def test_mixed_precision(world: World) -> None:
    """The statistics are those of whole parameters in full precision; replicas stay the same."""
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    how = {"policy": policy, "steps": FEW}
    results = world.run(run, "dense", COUNTS, OPTIONS["clip"], how, size=3)
    want = train(0, 1, "dense", COUNTS, OPTIONS["clip"], FEW)
    for name, p in want.items():
        assert all(torch.equal(results[0][name], other[name]) for other in results)
        torch.testing.assert_close(results[0][name], p, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("clip", (20, 16)),
        ("eigenbasis", (10, 8, 11, 7)),
        pytest.param("ekfac", (20, 16), marks=pytest.mark.slow),
    ],
)
def test_checkpoints(world: World, tmp_path: Path, name: str, counts: tuple[int, ...]) -> None:
    """Saved in two pieces or in pairs, a run goes on in three, in the other way, or whole."""
    options = OPTIONS[name]
    path = str(tmp_path / "saved")
    size = len(counts)
    if len(counts) == 2:
        other = (10, 8, 11, 7)
    else:
        other = (20, 16)
    world.run(run, "dense", counts, options, {"save": path, "steps": 3}, size=size)
    want = train(0, 1, "dense", (36,), options, FEW)
    how: dict[str, Any] = {"load": path, "start": 3, "steps": FEW}
    results = world.run(run, "dense", COUNTS, options, how, size=3)
    results += world.run(run, "dense", other, options, how, size=len(other))
    results.append(train(0, 1, "dense", (36,), options, **how))
    for parameter, p in want.items():
        for state in results:
            torch.testing.assert_close(state[parameter], p, rtol=1e-10, atol=1e-10)


def held(rank: int, size: int, name: str) -> Any:
    """Return what is held before and after a checkpoint, F̂'s diagonal, and what is saved."""
    net: Any = shard_model("dense", size) if size > 1 else model_of("dense")
    opt = optimizer(net, OPTIONS[name])
    advance(net, opt, "dense", COUNTS if size > 1 else (sum(COUNTS),), rank, range(3))
    before = opt.memory()
    saved = opt.state_dict()["state"]
    components = ("average", "state", "mean")
    tensors = [
        t for state in saved.values() for field in components for t in _tensors(state.get(field))
    ]
    pieces = [(tuple(t.shape), get_local_piece(t).nbytes) for t in tensors if t.numel() > 1]
    return before, opt.memory(), opt.gram().diagonal().cpu(), pieces


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    for value in nested.values() if isinstance(nested, dict) else ():
        yield from _tensors(value)


@pytest.mark.parametrize(
    "name",
    quick(["clip", "eigenbasis", "ekfac", "invariant damping"], "eigenbasis", "invariant damping"),
)
def test_factors_are_held_by_their_owners(world: World, name: str) -> None:
    """All processes together hold and save what one process does; masses are held by all."""
    single, _, gram, saved = held(0, 1, name)
    results = world.run(held, name, size=3)
    masses = 2 * 8 * 12  # in two other processes
    total = sum(before["averages"] for before, *_ in results)
    if name == "ekfac":  # all measure in the same bases
        assert all(before["averages"] < single["averages"] for before, *_ in results)
    else:
        assert single["averages"] <= total <= single["averages"] + masses
        assert sum(before["states"] for before, *_ in results) == single["states"]
    for before, after, diagonal, pieces in results:
        assert before == after
        torch.testing.assert_close(diagonal, gram, rtol=1e-8, atol=1e-10)
        for (shape, size), (piece_shape, piece) in zip(saved, pieces, strict=True):
            assert piece_shape == shape
            assert piece <= size * -(-max(shape) // 3) / max(shape)
    pieces_of_ranks = [pieces for *_, pieces in results]
    for (_, size), *cut in zip(saved, *pieces_of_ranks, strict=True):
        assert sum(piece for _, piece in cut) == size


def resume_run(rank: int, size: int, name: str, variant: str) -> Any:
    """Return parameters of a run, and of another one that takes up its state in the middle."""
    nets = [shard_model("convolutions", size) for _ in range(2)]
    one, two = (optimizer(net, OPTIONS[name]) for net in nets)
    counts = (10, 8, 11, 7)
    advance(nets[0], one, "convolutions", counts, rank, range(3))
    advance(nets[1], two, "convolutions", counts, rank, range(10, 11))
    set_model_state_dict(nets[1], get_model_state_dict(nets[0]))
    options = StateDictOptions(full_state_dict=True)
    if variant == "pieces":
        two.load_state_dict(one.state_dict())
    else:
        state: Any = get_optimizer_state_dict(nets[0], one, options=options)
        for entry in state["state"].values():
            assert not any(map(is_sharded, _tensors(entry)))
        if variant == "given out":
            set_optimizer_state_dict(nets[1], two, state, options=options)
        else:
            parameters = enumerate(dict(nets[0].named_parameters()))
            groups = one.state_dict()["param_groups"]
            numbered = {i: state["state"][n] for i, n in parameters}
            two.load_state_dict({"state": numbered, "param_groups": groups})
    for net, opt in zip(nets, (one, two), strict=True):
        advance(net, opt, "convolutions", counts, rank, range(3, FEW))
    return *map(whole, nets), one.memory(), two.memory()


WAYS = [
    ("clip", "pieces"),
    pytest.param("ekfac", "given out", marks=pytest.mark.slow),
    ("eigenbasis", "whole"),
    pytest.param("invariant damping", "pieces", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "variant"), WAYS)
def test_resumes_to_the_same_bits(world: World, name: str, variant: str) -> None:
    """A state is taken up in pieces, or whole on every process, by replicas of shards."""
    for one, two, *bytes_held in world.run(resume_run, name, variant):
        assert bytes_held[0] == bytes_held[1]
        assert all(torch.equal(p, two[n]) for n, p in one.items())


def change_one_replica(rank: int, size: int, at: int) -> None:
    """One of two replicas, in two pieces each, changes a gradient."""
    net = shard_model("dense", size)
    schedule = {"statistics_every": 2, "workers": size}  # with fewer, directions come from owners
    opt = kfac_of(net, 0.05, likelihood=pb.likelihoods.Categorical(), **schedule)
    for step in range(5):
        x, y = batch(10 * step + rank, 8, "dense")
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if rank == 1 and step == at:
            net.two.weight.grad.to_local().mul_(2.0)
        opt.step()


@pytest.mark.parametrize(("at", "what"), [(2, "gradients"), (3, "parameters")])
def test_replicas_of_shards_do_not_drift_apart(world: World, at: int, what: str) -> None:
    for error in world.errors(change_one_replica, at):
        assert f"The processes differ in their {what}: that of " in error


def build_adaptive(rank: int, size: int) -> None:
    kfac_of(shard_model("dense", size), damping=pb.optim.kfac.Adaptive(1e-2))


def test_controlled_steps_are_refused(world: World) -> None:
    for error in world.errors(build_adaptive):
        assert "A controlled step does not go with a sharded model" in error


def two_optimizers(rank: int, size: int) -> dict[str, Tensor]:
    """Train the last layer by one optimizer, and the others by another."""
    net: Any = shard_model("dense", size) if size > 1 else model_of("dense")
    params = list(net.parameters())
    options: dict[str, Any] = {**OPTIONS["clip"], "statistics_every": 2, "invert_every": 4}
    opts = [kfac_of(net, 0.05, params=group, **options) for group in (params[:-2], params[-2:])]
    for number in range(5):
        x, y = batch(number, sum(COUNTS), "dense")
        if size > 1:
            rows = share(COUNTS, rank)
        else:
            rows = slice(None)
        net.zero_grad()
        loss = F.cross_entropy(net(x[rows]), y[rows], reduction="sum")
        (loss / sum(COUNTS) * size).backward()
        for opt in opts:
            opt.step()
    if size > 1:
        return whole(net)
    return {n: p.detach() for n, p in net.named_parameters()}


def test_two_optimizers_on_one_model(world: World) -> None:
    want = two_optimizers(0, 1)
    for result in world.run(two_optimizers, size=3):
        for name, value in want.items():
            torch.testing.assert_close(result[name], value, rtol=1e-10, atol=1e-10)
