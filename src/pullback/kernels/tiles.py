r"""The NTK by tiles: batches of x against batches of x', the lower half alone where x' is x."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.checks import require_number
from .._core.errors import PullbackError
from .._core.processes import Processes
from .._core.products import SPLIT_ABOVE, full_precision
from ..maps import Pulled
from .layouts import KernelLayout
from .tangent import Tangent, as_arguments, count_samples

#: bytes for pulled-back covectors and for temporaries by default, beside the kernel itself
MEMORY = 2**30


@dataclass(frozen=True)
class TileLimits:
    """How memory is divided between chunks."""

    #: a chunk takes this fraction of the memory: two chunks are pulled back at a time, each with
    #: temporaries of its own size
    chunk_fraction: float = 1 / 4
    #: all chunks are kept if together they take this fraction of the memory
    kept_fraction: float = 1 / 2
    #: on a GPU, temporaries take this fraction of J's size or of the free memory
    gpu_fraction: float = 1 / 4
    #: chunks per process at least, so that long and short rows of tiles even out
    chunks_per_process: int = 2


_LIMITS = TileLimits()


@dataclass(frozen=True)
class Tile:
    """The kernel of the samples of x in `rows` and the samples of x' in `columns`."""

    rows: slice
    columns: slice
    values: Tensor


class Batch:
    """One argument of the kernel, in chunks whose pulled-back covectors fit the memory."""

    def __init__(self, tangent: Tangent, x: Any, layout: KernelLayout) -> None:
        self.args = as_arguments(x)
        self.count = count_samples(self.args)
        self._tangent = tangent
        self._layout = layout
        self._probe = tangent.probe(self.args)
        self.event = self._probe.event
        self._cache: dict[int, list[Pulled]] = {}
        self._is_cached = False
        self._step = self.count

    @property
    def jacobian(self) -> int:
        """The bytes that J would take."""
        space = self._tangent.space
        return self.count * self.event.numel() * space.size * space.dtype.itemsize

    def fit(self, chunk: int | None, memory: int, least: int) -> None:
        """Choose the chunks, at least so many, and whether all of them are cached."""
        itemsize = self._tangent.space.dtype.itemsize
        bytes_per_sample = self._probe.entries * self.event.numel() * itemsize
        self._is_cached = self.count * bytes_per_sample <= _LIMITS.kept_fraction * memory
        step = chunk
        if step is None:
            fitting = int(_LIMITS.chunk_fraction * memory) // bytes_per_sample
            step = max(1, min(self.count, fitting))
        self._step = min(step, -(-self.count // least))

    def has_large_products(self) -> bool:
        """Return True if pulling a chunk back has products so large that splitting them pays."""
        return 2 * self._probe.largest_layer_cost * self._step * self.event.numel() >= SPLIT_ABOVE

    def slices(self) -> list[slice]:
        """Return the samples of every chunk."""
        starts = range(0, self.count, self._step)
        return [slice(start, min(start + self._step, self.count)) for start in starts]

    def pull(self, chunk: slice) -> list[Pulled]:
        """Return a chunk's covectors, pulled back; all chunks are cached if they fit the memory."""
        if chunk.start in self._cache:
            return self._cache[chunk.start]
        linear = self._tangent.chunk(self.args, chunk.start, chunk.stop, self._probe)
        pulled = self._layout.pull(linear)
        if self._is_cached:
            self._cache[chunk.start] = pulled
        return pulled


def choose_memory(device: torch.device, jacobian: int) -> int:
    """Return the bytes for temporaries: on a GPU more than `MEMORY`, but less than J takes.

    Few large products keep a GPU busy, many small ones do not. A CPU gains nothing from more.

    Args:
        device: that of the parameters.
        jacobian: the bytes that J would take.
    """
    if device.type != "cuda":
        return MEMORY
    unused = 0
    stats: Any = torch.cuda.memory_stats_as_nested_dict(device)
    if stats:
        reserved = stats["reserved_bytes"]["all"]["current"]
        unused = reserved - stats["allocated_bytes"]["all"]["current"]
    free = torch.cuda.mem_get_info(device)[0] + unused
    return max(MEMORY, int(_LIMITS.gpu_fraction * min(jacobian, free)))


def check_sizes(chunk: int | None, memory: int | None = None) -> None:
    """Raise unless `chunk` counts samples and `memory` counts bytes, or they are None."""
    if chunk is not None:
        require_number("chunk, a number of samples,", chunk, least=1, whole=True)
    if memory is not None:
        require_number("memory, in bytes,", memory, positive=True)


def check_events(one: torch.Size, two: torch.Size) -> None:
    """Raise if outputs of different shapes would be paired."""
    if one != two:
        raise PullbackError(
            "x and x2 give outputs of different shapes",
            f"{tuple(one)} and {tuple(two)}",
            "Pass inputs for which the model has the same number of outputs",
        )


def compute_tiles(
    tangent: Tangent,
    x: Any,
    x2: Any,
    layout: KernelLayout,
    chunk: int | None,
    memory: int | None,
    processes: Processes,
) -> Iterator[Tile]:
    """Yield the tiles in this process's rows; with x2 = None those on and below the diagonal."""
    check_sizes(chunk, memory)
    device = tangent.space.device
    with full_precision(device, watched=False):
        batch = Batch(tangent, x, layout)
        other = batch if x2 is None else Batch(tangent, x2, layout)
    check_events(batch.event, other.event)
    if memory is None:
        memory = choose_memory(device, max(batch.jacobian, other.jacobian))
    least = 1
    if not processes.is_single:
        least = _LIMITS.chunks_per_process * processes.size
    for argument in (batch, other):
        argument.fit(chunk, memory, least)
    watched = batch.has_large_products() or other.has_large_products()
    with torch.no_grad(), full_precision(device, watched=watched):
        for i, rows in enumerate(batch.slices()):
            if find_owner(i, processes.size) == processes.rank:
                yield from _compute_row(batch, other, rows, layout, memory)


def _compute_row(
    batch: Batch, other: Batch, rows: slice, layout: KernelLayout, memory: int
) -> Iterator[Tile]:
    """Yield the tiles of one chunk of rows, up to the diagonal where both batches are one."""
    pulled = batch.pull(rows)
    for columns in other.slices():
        if other is not batch:
            yield Tile(rows, columns, layout.tile(pulled, other.pull(columns), memory))
        elif columns == rows:
            yield Tile(rows, columns, layout.tile(pulled, pulled, memory))
        elif columns.start < rows.start:
            yield Tile(rows, columns, layout.tile(pulled, batch.pull(columns), memory))


def find_owner(row: int, processes: int) -> int:
    """Return the process of a row of tiles: forth and back, since later rows are longer.

    >>> [find_owner(i, 3) for i in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    turn = row % (2 * processes)
    return min(turn, 2 * processes - 1 - turn)


def gather_tiles(tiles: Iterable[Tile], empty: Tensor, processes: Processes) -> Iterator[Tile]:
    """Yield the tiles of all processes.

    Args:
        tiles: those that this process multiplies.
        empty: a tensor without entries, in the kernel's dtype and on its device.
        processes: the processes that share the work.
    """
    with processes.raise_together():
        tiles = list(tiles)
        flat = torch.cat([empty, *(tile.values.reshape(-1) for tile in tiles)])
    headers = [(tile.rows, tile.columns, tile.values.shape) for tile in tiles]
    buffers = processes.gather_parts([flat], "kernel")[0]
    for headers_of_rank, buffer in zip(processes.gather_objects(headers), buffers, strict=True):
        start = 0
        for rows, columns, shape in headers_of_rank:
            stop = start + shape.numel()
            yield Tile(rows, columns, buffer[start:stop].view(shape))
            start = stop


def refuse_different_arguments(tangent: Tangent, x: Any, x2: Any, processes: Processes) -> None:
    """Raise if the processes have different inputs or parameters."""
    tensors = {f"x[{i}]": t for i, t in enumerate(as_arguments(x).tensors)}
    if x2 is not None:
        tensors |= {f"x2[{i}]": t for i, t in enumerate(as_arguments(x2).tensors)}
    tensors |= tangent.params
    digests = {name: (tuple(t.shape), _digest(t)) for name, t in tensors.items()}
    remedy = "Pass the same inputs on all processes, and broadcast the model's parameters"
    processes.require_same("the kernel's inputs or parameters (shape, digest)", digests, remedy)


def _digest(t: Tensor) -> str:
    """Return a hash of the tensor's bytes."""
    flat = t.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
