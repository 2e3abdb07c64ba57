"""What processes send each other in flat buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pullback._core.flags import checksum
from pullback._core.processes import Processes

from .checks import Checks, same_everywhere
from .world import GROUPS, World

CHECKS = Checks(__name__)


def parts(rank: int, lengths: tuple[int, ...]) -> list[Tensor]:
    """Return two tensors for each owner, which every process fills with its own numbers."""
    sizes = []
    for length in lengths:
        sizes += [length // 3, length - length // 3]
    return [torch.arange(float(n)) * (rank + 1) + i for i, n in enumerate(sizes)]


def owners(lengths: tuple[int, ...]) -> list[int]:
    return [i // 2 for i in range(2 * len(lengths))]


#: alike; one long beside short ones, which is sent by itself; one alone
LENGTHS = [(40, 50, 60), (1_500_000, 30, 0), (0, 2_000_000, 0)]


@CHECKS.add
def exchanged(rank: int, size: int) -> None:
    processes = Processes(GROUPS[size])
    for lengths in LENGTHS:
        tensors = parts(rank, lengths)
        by = owners(lengths)
        processes.exchange(tensors, by)
        for i, (t, owner) in enumerate(zip(tensors, by, strict=True)):
            torch.testing.assert_close(t, parts(owner, lengths)[i], rtol=0, atol=0)
    calls = processes.traffic()["exchanged"].calls
    assert calls == 1 + 2 + 1


@CHECKS.add
def summed_to_owners(rank: int, size: int) -> None:
    processes = Processes(GROUPS[size])
    for lengths in LENGTHS:
        by = owners(lengths)
        sums = processes.sum_to(parts(rank, lengths), by)
        for i, (t, owner) in enumerate(zip(sums, by, strict=True)):
            total = sum((parts(r, lengths)[i] for r in range(size)), torch.zeros(()))
            if owner == rank:
                want = total
            else:
                want = parts(rank, lengths)[i]
            torch.testing.assert_close(t, want, rtol=0, atol=0)


@CHECKS.add
def summed_later(rank: int, size: int) -> None:
    processes = Processes(GROUPS[size])
    t = torch.full((3,), rank + 1.0)
    pending = processes.launch_sum([t]).then(lambda sums: sums[0] * 2)
    t.zero_()  # it was copied
    assert processes.traffic()["sums"].calls == 1
    same_everywhere(pending.wait())
    torch.testing.assert_close(pending.wait(), torch.full((3,), float(size * (size + 1))))


@CHECKS.add
def compared(rank: int, size: int) -> None:
    processes = Processes(GROUPS[size])
    tensor = torch.linspace(0, 1, 70_000)
    piece = torch.tensor([rank if i == rank % 2 else -1 for i in range(2)])  # 0 and 2 have the same
    are_equal, flags = processes.compare(
        ["a", rank], [True, rank == 0], [checksum([tensor]), piece]
    )
    assert are_equal == [True, False, True, False]
    assert flags == [True, False]
    tensor[60_000] += 1e-16 * rank
    tensor[:3] += 1e-9 * (rank == 1)
    assert processes.compare([], [], [checksum([tensor, tensor[:5]])])[0] == [False]
    assert processes.compare([], [], [checksum([])])[0] == [True]
    assert processes.compare([], [], [piece[1 - rank % 2] - piece * 0])[0] == [True]


@pytest.mark.parametrize("name", CHECKS.functions)
def test_together(world: World, name: str) -> None:
    CHECKS.run(world, name)
