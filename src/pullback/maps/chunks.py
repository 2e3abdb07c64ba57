"""A map whose samples are linearized a chunk at a time, so that its graph fits a memory.

The derivatives of a wide network at many points take more memory than the rows A that they give. A
chunk's graph is dropped before that of the next chunk is built. What is left of a chunk depends on
the memory:

    A as a matrix, if it fits;
    else factors of A (layers' inputs and cotangents), if those of all chunks fit;
    else nothing: a chunk is linearized again whenever its rows are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.products import mirror_lower_triangle
from .._core.space import ParameterSpace
from .base import Linearization, Map, Pulled
from .operator import OperatorMap


@dataclass(frozen=True)
class ChunkLimits:
    """How the size of a chunk is estimated."""

    #: points at which the graph of a map is measured: enough that what does not grow with them, a
    #: few tensors of parameters, is a small part for usual widths
    probe_points: int = 8
    #: peak of a linearization with its reverse passes, as a multiple of what the graph saves;
    #: 2.1 to 2.5 were counted for networks of one to four layers in up to 100 dimensions
    peak_per_saved: float = 3.0


LIMITS = ChunkLimits()


def count_saved_bytes(map: OperatorMap, params: Mapping[str, Tensor]) -> int:
    """Return the bytes per sample that the graph of the network's derivatives saves."""
    samples = min(map.x.shape[1], LIMITS.probe_points)
    x = map.x[:, :samples]
    probe = OperatorMap(map.network, x, map.scheme, _read_all_channels, torch.ones_like(x[0, :, 0]))
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    with torch.no_grad():
        probe(leaves)  # shows whether derivatives are nested
    if not probe.nested_because:
        return _count_graph_bytes(probe, leaves) // samples
    # torch.func refuses hooks. Each order of nested derivatives saves the graph before it again
    graphs = len(map.scheme) * 2**map.scheme.order
    points = x.flatten(0, 1)
    value_bytes = _count_graph_bytes(lambda leaves: map.network(dict(leaves), points), leaves)
    return graphs * value_bytes // samples


def _count_graph_bytes(function: Callable[[Any], Any], leaves: Mapping[str, Tensor]) -> int:
    """Return the bytes that the graph of a function of the leaves saves, without the leaves."""
    leaf_addresses = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in leaf_addresses:
            saved[address] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with hooks, torch.enable_grad():
        function(leaves)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _read_all_channels(channels: Any, params: dict[str, Tensor]) -> Tensor:
    """Return all derivatives of one sample in a row, (N, …), as an operator would read them."""
    del params
    return channels[:].movedim(2, 0).flatten(1)


class ChunkedMap(Map):
    """z of several maps, one after the other: (N, R). Each is linearized by itself.

    Args:
        maps: of the same network, at consecutive samples.
        memory: bytes that A, or its factors, may take.
    """

    def __init__(self, maps: Sequence[OperatorMap], memory: int) -> None:
        self.maps = tuple(maps)
        self.memory = memory
        self.counts = [map.x.shape[1] for map in self.maps]

    @property
    def nested_because(self) -> str:
        """Why the derivatives are nested instead of carried forward, or empty."""
        return next((map.nested_because for map in self.maps if map.nested_because), "")

    def scale(self, factors: Tensor) -> None:
        """Multiply the original weights by factors (N,) from now on."""
        for map, share in zip(self.maps, factors.split(self.counts), strict=True):
            map.scale(share)

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """z: (N, R)."""
        return torch.cat([map(params) for map in self.maps])

    def linearize(self, params: Mapping[str, Tensor]) -> ChunkedLinearization:
        return ChunkedLinearization(self, params)


class ChunkedLinearization(Linearization):
    """z, and J a chunk of samples at a time."""

    def __init__(self, source: ChunkedMap, params: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace(params)
        self._params = {name: p.detach() for name, p in params.items()}
        self.source = source
        with torch.no_grad():
            self.value = source(self._params).to(self.space.dtype)
        self.structured = not source.nested_because
        #: entries that one evaluation holds at once, at most
        self.footprint = source.memory // self.value.element_size()

    def linearize_chunk(self, number: int) -> Linearization:
        """Return the linearization of one chunk."""
        return self.source.maps[number].linearize(self._params)

    def _linearize_chunks(self) -> Iterator[Linearization]:
        for number in range(len(self.source.maps)):
            yield self.linearize_chunk(number)

    def jvp(self, v: Tensor) -> Tensor:
        return torch.cat([chunk.jvp(v) for chunk in self._linearize_chunks()])

    def vjp(self, u: Tensor) -> Tensor:
        out = self.space.zeros(self.space.size)
        for chunk, covectors in zip(
            self._linearize_chunks(), u.split(self.source.counts), strict=True
        ):
            out += chunk.vjp(covectors)
        return out

    def pullback(self, covectors: Tensor) -> Pulled:
        shape = (self.value.shape[0], covectors.shape[0])
        pulled = ChunkedPulled(self, covectors)
        matrix_bytes = shape[0] * shape[1] * self.space.size * self.value.element_size()
        if matrix_bytes > self.source.memory:
            return pulled
        return Pulled.of_rows(self.space, shape, pulled.rows(), pulled.coverage)

    def pullback_factored(self, covectors: Tensor) -> Pulled:
        raise PullbackError(
            "A map in chunks has no factors of all samples",
            "they would not fit its memory",
            "Use the map of all samples",
        )


class ChunkedPulled(Pulled):
    """Covectors pulled back a chunk of samples at a time.

    The factors of chunks are kept if those of all fit the memory, else those of the last chunk.
    """

    is_chunked = True

    def __init__(self, linearization: ChunkedLinearization, covectors: Tensor) -> None:
        shape = (linearization.value.shape[0], covectors.shape[0])
        super().__init__(linearization.space, shape, [])
        self._linearization = linearization
        self._covectors = covectors.split(linearization.source.counts, 1)
        self._counts = linearization.source.counts
        self._cache: dict[int, Pulled] = {}
        self._keeps_all: bool | None = None

    def __reduce__(self) -> Any:
        return Pulled.of_rows, (self.space, self.shape, self.rows(), self.coverage)

    def _pull(self, number: int) -> Pulled:
        """Return the covectors of one chunk, pulled back."""
        if number in self._cache:
            return self._cache[number]
        if not self._keeps_all:
            self._cache.clear()  # before the next chunk is linearized
        chunk = self._linearization.linearize_chunk(number)
        pulled = chunk.pullback(self._covectors[number])
        del chunk
        if self._keeps_all is None:
            total = pulled.nbytes * self.shape[0] / self._counts[number]
            self._keeps_all = total <= self._linearization.source.memory
            self.coverage = pulled.coverage
        self._cache[number] = pulled
        return pulled

    def _pull_all(self) -> Iterator[tuple[slice, Pulled]]:
        """Yield the samples of each chunk with its covectors, pulled back."""
        start = 0
        for number, count in enumerate(self._counts):
            yield slice(start, start + count), self._pull(number)
            start += count

    def write_rows(self, out: Tensor) -> None:
        by_sample = out.view(*self.shape, self.space.size)
        for samples, pulled in self._pull_all():
            pulled.write_rows(by_sample[samples].flatten(0, 1))

    def narrow(self, start: int, stop: int) -> Pulled:
        shape = (stop - start, self.shape[1])
        matrix = self.space.zeros(*shape, self.space.size)
        first = 0
        for number, count in enumerate(self._counts):
            lower = max(start, first)
            upper = min(stop, first + count)
            if lower < upper:
                part = self._pull(number).narrow(lower - first, upper - first)
                rows = part.rows().view(-1, shape[1], self.space.size)
                matrix[lower - start : upper - start] = rows
            first += count
        return Pulled.of_rows(self.space, shape, matrix.flatten(0, 1), self.coverage)

    def trace_covectors(self) -> Pulled:
        raise PullbackError(
            "A map in chunks has no trace over covectors",
            "its samples are not held at once",
            "Use the map of all samples",
        )

    def kernel(
        self,
        other: Pulled | None = None,
        *,
        budget: int = 2**30,
        dtype: torch.dtype | None = None,
        may_center: bool = False,
    ) -> Tensor:
        """A A'ᵀ, (N·R, N'·R'), chunk by chunk."""
        del dtype, may_center  # of metrics that couple samples, which residuals do not have
        if other is not None and other is not self:
            return torch.cat([p.kernel(other, budget=budget) for _, p in self._pull_all()])
        covectors = self.shape[1]
        out = self.space.zeros(self.shape[0] * covectors, self.shape[0] * covectors)
        start = 0
        for number, count in enumerate(self._counts):
            pulled = self._pull(number)
            rows = slice(start * covectors, (start + count) * covectors)
            out[rows, rows] = pulled.kernel(budget=budget)
            self._add_lower_tiles(out, number, pulled, rows, budget)
            start += count
        return mirror_lower_triangle(out)

    def _add_lower_tiles(
        self, out: Tensor, number: int, pulled: Pulled, rows: slice, budget: int
    ) -> None:
        """Write the products of one chunk with all chunks before it."""
        start = 0
        for earlier in range(number):
            width = self._counts[earlier] * self.shape[1]
            tile = pulled.kernel(self._pull(earlier), budget=budget)
            out[rows, start : start + width] = tile
            start += width

    def project(self, v: Tensor) -> Tensor:
        return torch.cat([pulled.project(v) for _, pulled in self._pull_all()])

    def lift(self, c: Tensor) -> Tensor:
        out = self.space.zeros(self.space.size)
        for samples, pulled in self._pull_all():
            out += pulled.lift(c[samples])
        return out


#: (start, stop) ↦ the map at these samples
BuildMap = Callable[[int, int], OperatorMap]


def build_in_chunks(
    build: BuildMap, samples: int, params: Mapping[str, Tensor], memory: int
) -> OperatorMap | ChunkedMap:
    """Return the map at all samples, in chunks if linearizing it would exceed the memory.

    Args:
        build: gives the map at the samples in [start, stop).
        samples: how many there are.
        params: of the network.
        memory: bytes that the graph with its reverse passes may take, and A or its factors.
    """
    whole = build(0, samples)
    bytes_per_sample = LIMITS.peak_per_saved * count_saved_bytes(whole, params)
    chunk = max(1, int(memory / max(1.0, bytes_per_sample)))
    if chunk >= samples:
        return whole
    starts = range(0, samples, chunk)
    return ChunkedMap([build(start, min(start + chunk, samples)) for start in starts], memory)
