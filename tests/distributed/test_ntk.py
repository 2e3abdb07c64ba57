"""Tiles of a tangent kernel by process are the kernel of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pullback as pb

from .checks import Checks, same_everywhere
from .world import World, place

CHECKS = Checks(__name__)


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(5, 2)).to(place())


def inputs(count: int) -> Tensor:
    return torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(count)).to(place())


def compare(count: int, other: int | None = None, **options: object) -> None:
    net = model()
    x = inputs(count)
    if other is None:
        x2 = None
    else:
        x2 = inputs(other)
    want = pb.kernels.ntk(net, x, x2, **options)  # pyright: ignore
    kernel = pb.kernels.ntk(net, x, x2, group=dist.group.WORLD, **options)  # pyright: ignore
    assert kernel.shape == want.shape
    assert (kernel - want).abs().max() <= 1e-13 * want.abs().max()
    same_everywhere(kernel)


@CHECKS.add
def symmetric(rank: int, size: int) -> None:
    for count in (1, 2, 11, 40):
        compare(count)
        compare(count, layout="trace")


@CHECKS.add
def of_two_batches(rank: int, size: int) -> None:
    compare(7, 3)
    compare(2, 9, layout="diagonal")
    compare(13, 13, chunk=2)


@CHECKS.add
def work_is_shared(rank: int, size: int) -> None:
    """Every process multiplies about as many tiles as the others."""
    rows = [pb.kernels.tiles.find_owner(i, size) for i in range(4 * size)]
    counts = [sum(i + 1 for i, k in enumerate(rows) if k == r) for r in range(size)]
    assert max(counts) == min(counts)


@CHECKS.add
def other_inputs_are_refused(rank: int, size: int) -> None:
    with pytest.raises(pb.PullbackError, match="differ in the kernel's inputs"):
        pb.kernels.ntk(model(), inputs(6) + rank, group=dist.group.WORLD)
    x = inputs(6)
    with pytest.raises(pb.PullbackError, match="differ in the kernel's inputs"):
        pb.kernels.ntk(model(), x.flip(0) if rank else x, group=dist.group.WORLD)
    net = model()
    with torch.no_grad():
        net[0].bias += rank  # pyright: ignore
    with pytest.raises(pb.PullbackError, match=r"0\.bias"):
        pb.kernels.ntk(net, inputs(6), group=dist.group.WORLD)


@pytest.mark.parametrize("name", CHECKS.functions)
def test_all_processes(world: World, name: str) -> None:
    CHECKS.run(world, name)
