r"""The NTK by tiles: batches of x against batches of x', the lower half alone where x' is x."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._core.checks import refuse_number
from .._core.errors import PullbackError
from .._core.processes import Processes
from .._core.products import SPLIT_ABOVE, full_precision
from ..maps import Pulled
from .layouts import KernelLayout
from .tangent import Tangent, arguments, samples

MEMORY = 2**30  # bytes for what is pulled back and for temporaries; the kernel itself is beside it


#: rows, columns, and the kernel of these samples
Tile = tuple[slice, slice, Tensor]


class Batch:
    """One argument of the kernel, in chunks whose pulled-back covectors fit the memory."""

    def __init__(self, tangent: Tangent, x: Any, layout: KernelLayout) -> None:
        self.args = arguments(x)
        self.count = samples(self.args)
        self._tangent, self._layout = tangent, layout
        self._probe = tangent.probe(self.args)
        self.event = self._probe.event
        self._kept: dict[int, list[Pulled]] = {}
        self._keep, self._step = False, self.count

    @property
    def jacobian(self) -> int:
        """Bytes that J would take."""
        space = self._tangent.space
        return self.count * self.event.numel() * space.size * space.dtype.itemsize

    def fit(self, chunk: int | None, memory: int, least: int) -> None:
        """Choose the chunks, at least so many, and whether they are kept."""
        held = self._probe.entries * self.event.numel() * self._tangent.space.dtype.itemsize
        self._keep = 2 * self.count * held <= memory
        # two chunks at a time
        step = max(1, min(self.count, memory // (4 * held))) if chunk is None else chunk
        self._step = min(step, -(-self.count // least))

    def large(self) -> bool:
        """Whether pulling a chunk back has products that pay to be split."""
        return 2 * self._probe.widest * self._step * self.event.numel() >= SPLIT_ABOVE

    def slices(self) -> list[slice]:
        """The chunks."""
        step = self._step
        return [slice(a, min(a + step, self.count)) for a in range(0, self.count, step)]

    def pull(self, some: slice) -> list[Pulled]:
        """A chunk's covectors, pulled back; all chunks are kept if they fit the memory."""
        if some.start in self._kept:
            return self._kept[some.start]
        linear = self._tangent.chunk(self.args, some.start, some.stop, self._probe)
        pulled = self._layout.pull(linear)
        if self._keep:
            self._kept[some.start] = pulled
        return pulled


def room(device: torch.device, jacobian: int) -> int:
    """Bytes for temporaries by default: less than J takes, as far as the device has them.

    Few large products keep a GPU busy, many small ones do not; a CPU's cache is small anyway.
    """
    if device.type != "cuda" or jacobian <= 4 * MEMORY:
        return MEMORY
    stats: Any = torch.cuda.memory_stats_as_nested_dict(device)
    cached = (
        stats["reserved_bytes"]["all"]["current"] - stats["allocated_bytes"]["all"]["current"]
        if stats
        else 0
    )
    free = torch.cuda.mem_get_info(device)[0] + cached
    return max(MEMORY, min(jacobian // 4, free // 4))


def check_sizes(chunk: int | None, memory: int | None = None) -> None:
    """Raise where there is no number of samples to take at a time."""
    if chunk is not None:
        refuse_number("chunk, a number of samples,", chunk, least=1, whole=True)
    if memory is not None:
        refuse_number("memory, in bytes,", memory, positive=True)


def check_events(one: torch.Size, two: torch.Size) -> None:
    """Raise where outputs of different shapes would be paired."""
    if one != two:
        raise PullbackError(
            "x and x2 give outputs of different shapes",
            f"{tuple(one)} and {tuple(two)}",
            "Pass inputs for which the model has the same number of outputs",
        )


def tiles(
    tangent: Tangent,
    x: Any,
    x2: Any,
    layout: KernelLayout,
    chunk: int | None,
    memory: int | None,
    processes: Processes,
) -> Iterator[Tile]:
    """The tiles in this process's rows; with x2 = None only those on and below the diagonal."""
    check_sizes(chunk, memory)
    device = tangent.space.device
    with full_precision(device, watched=False):
        one = Batch(tangent, x, layout)
        two = one if x2 is None else Batch(tangent, x2, layout)
    check_events(one.event, two.event)
    memory = room(device, max(one.jacobian, two.jacobian)) if memory is None else memory
    for batch in (one, two):
        batch.fit(chunk, memory, 2 * processes.size if processes.size > 1 else 1)
    watched = one.large() or two.large()
    with torch.no_grad(), full_precision(device, watched=watched):
        for i, rows in enumerate(one.slices()):
            if owner(i, processes.size) != processes.rank:
                continue
            left = one.pull(rows)
            for some in two.slices():
                if two is one and some.start > rows.start:
                    break
                right = left if two is one and some == rows else two.pull(some)
                yield rows, some, layout.tile(left, right, memory)


def owner(row: int, processes: int) -> int:
    """The process of a row of tiles: to and fro, since rows below the diagonal grow longer.

    >>> [owner(i, 3) for i in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    turn = row % (2 * processes)
    return min(turn, 2 * processes - 1 - turn)


def gather_tiles(own: Iterable[Tile], empty: Tensor, processes: Processes) -> Iterator[Tile]:
    """All tiles, each from the process that multiplied it."""
    with processes.raise_together():
        own = list(own)
        places = [(a.start, a.stop, b.start, b.stop, tuple(tile.shape)) for a, b, tile in own]
        flat = torch.cat([empty, *(tile.reshape(-1) for *_, tile in own)])
    found = processes.gather_parts([flat], "kernel")[0]
    for several, values in zip(processes.gather_objects(places), found, strict=True):
        at = 0
        for a, b, c, d, shape in several:
            size = torch.Size(shape).numel()
            yield slice(a, b), slice(c, d), values[at : at + size].view(shape)
            at += size


def refuse_others(tangent: Tangent, x: Any, x2: Any, processes: Processes) -> None:
    """Raise where processes have other inputs or parameters."""
    batches = arguments(x).tensors, [] if x2 is None else arguments(x2).tensors
    named = {f"x{i or ''}[{j}]": a for i, args in enumerate(batches) for j, a in enumerate(args)}
    named |= tangent.params
    seen = {name: (tuple(t.shape), _digest(t)) for name, t in named.items()}
    remedy = "Pass the same inputs on all processes, and broadcast the model's parameters"
    processes.require_same("the kernel's inputs or parameters (shape, digest)", seen, remedy)


def _digest(t: Tensor) -> str:
    """A hash of its bytes."""
    flat = t.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
