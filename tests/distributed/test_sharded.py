"""K-FAC of a model that `fully_shard` has cut into pieces, uneven and empty ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pullback as pb

from .test_kfac import OPTIONS
from .training import IGNORED, batch, load, model_of, save, share, train
from .world import GROUPS, World, place

COUNTS = (15, 8, 13)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    own = World(4)
    yield own
    own.close()


def sharded(kind: str, size: int, **options: Any) -> Any:
    """Every layer by itself, and the rest with the root; four processes are two pairs."""
    model = model_of(kind)
    if size == 4:
        own = init_device_mesh(place().type, (2, 2), mesh_dim_names=("replicas", "shards"))
    else:
        own = DeviceMesh.from_group(GROUPS[size], place().type)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=own, **options)
    return fully_shard(model, mesh=own, **options)


def whole(net: Any) -> dict[str, Tensor]:
    return {n: p.full_tensor().detach().cpu() for n, p in net.named_parameters()}


def run(
    rank: int,
    size: int,
    kind: str,
    counts: tuple[int, ...],
    options: dict[str, Any],
    how: dict[str, Any],
) -> dict[str, Tensor]:
    net = sharded(kind, size, **how.get("policy", {}))
    options = {"lr": 0.05, "statistics_every": 2, "invert_every": 4, **options}
    opt = pb.KFAC(net, **options)
    if path := how.get("load"):
        load(net, opt, path, size)
    for step in range(how.get("start", 0), how.get("steps", 10)):
        x, y = batch(step, sum(counts), kind)
        total, rows = (y != IGNORED).sum(), share(counts, rank)
        opt.zero_grad()
        z = net(x[rows]).flatten(0, -2)
        (F.cross_entropy(z, y[rows].flatten(), reduction="sum") / total * size).backward()
        opt.step()
    if path := how.get("save"):
        save(net, opt, path, size)
    return whole(net)


def equal(
    world: World, kind: str, options: dict[str, Any], counts: tuple[int, ...] = COUNTS, **how: Any
) -> None:
    found = world.run(run, kind, counts, options, how, size=len(counts))
    want = train(0, 1, kind, counts, {**options, "workers": None})
    for name, p in want.items():
        for other in found[1:]:
            assert torch.equal(found[0][name], other[name]), name
        torch.testing.assert_close(found[0][name], p, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["dense", "convolutions", "attention", "recurrence"])
def test_layers(world: World, kind: str) -> None:
    equal(world, kind, OPTIONS["clip"])


@pytest.mark.parametrize("name", ["no clip", "ekfac", "eigenbasis", "spectral", "empirical"])
def test_options(world: World, name: str) -> None:
    equal(world, "dense", OPTIONS[name])


def test_kept_whole_after_the_forward_pass(world: World) -> None:
    equal(world, "dense", OPTIONS["clip"], policy={"reshard_after_forward": False})


def test_replicas_of_shards(world: World) -> None:
    equal(world, "dense", OPTIONS["clip"], (10, 8, 11, 7))
    equal(world, "convolutions", {**OPTIONS["eigenbasis"], "workers": 2}, (10, 8, 11, 7))


def test_workers_and_empty_batches(world: World) -> None:
    equal(world, "dense", {**OPTIONS["clip"], "workers": 1}, (20, 0, 16))


def test_mixed_precision(world: World) -> None:
    """The statistics are those of whole parameters in full precision; replicas stay the same."""
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    found = world.run(run, "dense", COUNTS, OPTIONS["clip"], {"policy": policy}, size=3)
    want = train(0, 1, "dense", COUNTS, OPTIONS["clip"])
    for name, p in want.items():
        assert all(torch.equal(found[0][name], other[name]) for other in found)
        torch.testing.assert_close(found[0][name], p, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["clip", "eigenbasis"])
def test_checkpoints(world: World, tmp_path: Path, name: str) -> None:
    """Saved in two pieces, a run goes on in three pieces, in pairs, or whole."""
    options, path = OPTIONS[name], str(tmp_path / "two")
    world.run(run, "dense", (20, 16), options, {"save": path, "steps": 5}, size=2)
    want = train(0, 1, "dense", (36,), options)
    how: dict[str, Any] = {"load": path, "start": 5}
    found = world.run(run, "dense", COUNTS, options, how, size=3)
    found += world.run(run, "dense", (10, 8, 11, 7), options, how)
    found.append(train(0, 1, "dense", (36,), options, **how))
    for parameter, p in want.items():
        for other in found:
            torch.testing.assert_close(other[parameter], p, rtol=1e-10, atol=1e-10)


def held(rank: int, size: int, name: str) -> Any:
    """Return what is held before and after a checkpoint, the bytes of that, and F̂'s diagonal."""
    net: Any = sharded("dense", size) if size > 1 else model_of("dense")
    opt = pb.KFAC(net, **{"lr": 0.05, "statistics_every": 2, "invert_every": 4, **OPTIONS[name]})
    for step in range(3):
        x, y = batch(step, sum(COUNTS), "dense")
        rows = share(COUNTS, rank) if size > 1 else slice(None)
        opt.zero_grad()
        loss = F.cross_entropy(net(x[rows]), y[rows], reduction="sum")
        (loss * size / sum(COUNTS)).backward()
        opt.step()
    before, saved = opt.memory(), opt.state_dict()["state"]
    factors = sum(t.nbytes for own in saved.values() for t in _tensors(own["average"]))
    return before, opt.memory(), factors, opt.gram().diagonal().cpu()


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    for part in nested.values() if isinstance(nested, dict) else ():
        yield from _tensors(part)


@pytest.mark.parametrize("name", ["clip", "eigenbasis", "ekfac", "invariant damping"])
def test_factors_are_held_by_their_owners(world: World, name: str) -> None:
    """All processes together hold what one process does; masses are held by all."""
    alone, _, saved, gram = held(0, 1, name)
    found = world.run(held, name, size=3)
    masses = 2 * 8 * 12  # in two other processes
    total = sum(before["averages"] for before, *_ in found)
    if name == "ekfac":  # all measure in the same bases
        assert all(before["averages"] < alone["averages"] for before, *_ in found)
    else:
        assert alone["averages"] <= total <= alone["averages"] + masses
        assert sum(before["inverses"] for before, *_ in found) == alone["inverses"]
    for before, after, factors, diagonal in found:
        assert before == after
        assert factors == saved  # a checkpoint is whole everywhere
        torch.testing.assert_close(diagonal, gram, rtol=1e-8, atol=1e-10)


def parted(rank: int, size: int, at: int) -> None:
    """One of two replicas, in two pieces each, changes a gradient."""
    net = sharded("dense", size)
    every = {"statistics_every": 2, "workers": size}  # with fewer, directions come from owners
    opt = pb.KFAC(net, 0.05, likelihood=pb.likelihoods.Categorical(), **every)
    for step in range(5):
        x, y = batch(10 * step + rank, 8, "dense")
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        if rank == 1 and step == at:
            net.two.weight.grad.to_local().mul_(2.0)
        opt.step()


@pytest.mark.parametrize(("at", "what"), [(2, "gradients"), (3, "parameters")])
def test_replicas_of_shards_do_not_drift_apart(world: World, at: int, what: str) -> None:
    for error in world.errors(parted, at):
        assert f"The processes differ in their {what}: that of " in error


def controlled(rank: int, size: int) -> None:
    pb.KFAC(sharded("dense", size), damping=pb.optim.kfac.Adaptive(1e-2))


def test_controlled_steps_are_refused(world: World) -> None:
    for error in world.errors(controlled):
        assert "A controlled step does not go with a sharded model" in error
