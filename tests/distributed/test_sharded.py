"""K-FAC of a model that `fully_shard` has cut into pieces, uneven and empty ones among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pullback as pb

from .test_kfac import OPTIONS
from .training import IGNORED, batch, load, model_of, save, share, train
from .world import World

COUNTS = (15, 8, 13)


def sharded(kind: str, mesh: tuple[int, ...], **options: Any) -> Any:
    """Every layer by itself, and the rest with the root."""
    model = model_of(kind)
    names = ("replicas", "shards")[2 - len(mesh) :]
    own = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=own, **options)
    return fully_shard(model, mesh=own, **options)


def whole(net: Any) -> dict[str, Tensor]:
    return {n: p.full_tensor().detach() for n, p in net.named_parameters()}


def run(
    rank: int, size: int, kind: str, options: dict[str, Any], how: dict[str, Any]
) -> dict[str, Tensor]:
    net = sharded(kind, how.get("mesh", (size,)), **how.get("policy", {}))
    options = {"lr": 0.05, "statistics_every": 2, "invert_every": 4, **options}
    opt = pb.KFAC(net, **options)
    if path := how.get("load"):
        load(net, opt, path, size)
    for step in range(how.get("start", 0), how.get("steps", 10)):
        x, y = batch(step, sum(COUNTS), kind)
        total, rows = (y != IGNORED).sum(), share(how.get("counts", COUNTS), rank)
        opt.zero_grad()
        z = net(x[rows]).flatten(0, -2)
        (F.cross_entropy(z, y[rows].flatten(), reduction="sum") / total * size).backward()
        opt.step()
    if path := how.get("save"):
        save(net, opt, path, size)
    return whole(net)


def equal(world: World, kind: str, options: dict[str, Any], **how: Any) -> None:
    found = world.run(run, kind, options, how)
    want = train(0, 1, kind, COUNTS, options)
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
