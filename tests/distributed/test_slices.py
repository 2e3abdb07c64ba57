"""Steps in the quotient under DistributedDataParallel are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pullback as pb
from tests.kfac_options import kfac_of

from .checks import Checks, only, same_everywhere
from .world import World, place

CHECKS = Checks(__name__)
CUTS = (0, 7, 7, 12)  # process 1 has no samples


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    return nn.Sequential(*layers).to(place())


def compare(rank: int, size: int, make: Callable[[nn.Module, Any], Any]) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(12, 4, generator=g).to(place())
    y = torch.randint(0, 3, (12,), generator=g).to(place())
    rows = slice(CUTS[rank], CUTS[rank + 1])
    first = model()

    def run(group: Any, selected: slice, scale: float) -> Tensor:
        net = copy.deepcopy(first)
        if group is dist.group.WORLD:
            outer = DDP(net)
        else:
            outer = net
        opt = make(outer, group)
        for _ in range(5):
            opt.zero_grad()
            (F.cross_entropy(outer(x[selected]), y[selected], reduction="sum") * scale).backward()
            opt.step()
        return flat(net)

    shared = run(dist.group.WORLD, rows, size / 12)
    same_everywhere(shared)
    if rank == 0:
        single = run(only(0), slice(0, 12), 1 / 12)
        assert (single - shared).norm() <= 1e-10 * (single - flat(first)).norm()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@CHECKS.add
def slice_sgd(rank: int, size: int) -> None:
    for options in (
        {"momentum": 0.9, "weight_decay": 0.01},
        {"group": "layer", "gradient": "gtk-orthonormal"},
    ):
        compare(rank, size, lambda m, g, o=options: pb.SliceSGD(m, 0.1, processes=g, **o))


@CHECKS.add
def what_the_processes_must_be_told(rank: int, size: int) -> None:
    with pytest.raises(pb.PullbackError, match=r"DistributedDataParallel.*processes="):
        pb.SliceSGD(model(), 0.1)
    pb.SliceSGD(DDP(model()), 0.1)


@CHECKS.add
def train_sliced_adam(rank: int, size: int) -> None:
    def adam(m: nn.Module, group: Any) -> Any:
        return pb.symmetry.Sliced(torch.optim.Adam(m.parameters(), 1e-2), m)

    compare(rank, size, adam)


@CHECKS.add
def sliced_kfac(rank: int, size: int) -> None:
    def kfac(m: nn.Module, group: Any) -> Any:
        likelihood = pb.likelihoods.Categorical()
        schedule = {"statistics_every": 2, "invert_every": 4}
        opt = kfac_of(m, 0.05, likelihood=likelihood, fisher="exact", group=group, **schedule)
        return pb.symmetry.Sliced(opt)

    compare(rank, size, kfac)


@pytest.mark.parametrize("name", CHECKS.functions)
def test_all_processes(world: World, name: str) -> None:
    CHECKS.run(world, name)
