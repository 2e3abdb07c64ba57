"""Functions of rank and size that all processes run, in float64, each of them a test."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .world import World

Check = Callable[[int, int], None]


class Checks:
    """The checks of one test module, as `CHECKS` in it."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.functions = dict[str, Check]()

    def add(self, function: Check) -> Check:
        """Decorate a check."""
        self.functions[function.__name__] = function
        return function

    def run(self, world: World, name: str) -> None:
        """Raise what a process raised."""
        world.run(_run, self.module, name)


def _run(rank: int, size: int, module: str, name: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        import_module(module).CHECKS.functions[name](rank, size)
    finally:
        torch.set_default_dtype(before)


def same_everywhere(*tensors: Tensor) -> None:
    """Raise unless the tensors have the same bits on all processes."""
    for t in tensors:
        gathered = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, t.detach().contiguous())
        assert all(torch.equal(gathered[0], other) for other in gathered[1:])


def told_everywhere(value: object) -> None:
    """Raise unless all processes have the same."""
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    assert all(other == value for other in gathered)


def only(rank: int) -> Any:
    """Return the group of this process by itself."""
    return dist.new_group([rank], use_local_synchronization=True)
