"""The rows A = SᵀJ that a Gram is made of: one block for each linearized map.

`DistributedRowStack` (`distributed_rows.py`) joins the rows of several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Factor
from .._core.products import has_fast_float64, mirror_lower_triangle
from .._core.space import ParameterSpace
from ..maps import Covered, Linearization, Pulled, identity_covectors


class RowBlock:
    """One linearized map with the factor of its metric: the rows A = SᵀJ of its samples."""

    def __init__(self, linearization: Linearization, factor: Factor) -> None:
        self.linearization = linearization
        self.factor = factor
        self.samples = linearization.value.shape[0]
        self.count = self.samples * prod(factor.white)
        #: how parameters were covered whose rows were pulled back in parts, and are not kept
        self._coverage_of_parts: list[Covered] = []

    @cached_property
    def pulled_covectors(self) -> Pulled:
        """The covectors S (or, where S couples samples, the coordinates) pulled back."""
        return self.linearization.pullback(self._covectors())

    def _covectors(self) -> Tensor:
        """What is pulled back: S, or the coordinates if S couples samples, (R, N, *event)."""
        value = self.linearization.value
        if self.factor.couples_samples:
            return identity_covectors(value)
        return self.factor.covectors(value)

    @property
    def coverage(self) -> Sequence[Covered]:
        """How each parameter was covered; empty where autograd alone was used so far."""
        if "pulled_covectors" in vars(self):
            return self.pulled_covectors.coverage
        return self._coverage_of_parts

    def _shape_white(self, c: Tensor) -> Tensor:
        """(..., n) -> (..., N, *white)."""
        return c.reshape(*c.shape[:-1], self.samples, *self.factor.white)

    def transpose(self, v: Tensor) -> Tensor:
        """Sᵀ on the last axis of v, (..., N·|event|) -> (..., n)."""
        shaped = v.reshape(*v.shape[:-1], *self.linearization.value.shape)
        return self.factor.transpose(shaped).flatten(v.ndim - 1)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A, (n, p), or its rows of the samples in [start, stop)."""
        if self.factor.couples_samples:
            return self.transpose(self.pulled_covectors.rows().T).T
        if start == 0 and stop in (None, self.samples):
            return self.pulled_covectors.rows()
        return self.pulled_covectors.narrow(start, self.samples if stop is None else stop).rows()

    def write_rows(self, out: Tensor) -> None:
        """Write A to `out`, (n, p), whose rows lie behind each other in memory."""
        if self.factor.couples_samples:
            out.copy_(self.rows())
        else:
            self.pulled_covectors.write_rows(out)

    def kernel(self, budget: int) -> Tensor:
        """A Aᵀ, (n, n), in float64 where S couples samples and the device is fast at that.

        Such an S subtracts means. What is left of the kernel may be a thousandth of it, and the
        round-off of float32 would exceed small dampings.
        """
        value = self.linearization.value
        if not self.factor.couples_samples:
            return self._multiply_covectors(budget, value.dtype)
        dtype = value.dtype
        if has_fast_float64(value.device):
            dtype = torch.float64
        kernel = self.transpose(self._multiply_covectors(budget, dtype))
        return self.transpose(kernel.T)

    def _multiply_covectors(self, budget: int, dtype: torch.dtype) -> Tensor:
        """The products of the pulled-back covectors, (N·R, N·R), up to what S subtracts.

        They are pulled back and kept. Where they would not fit the budget they are pulled back
        layer by layer and not kept.
        """
        may_center = self.factor.subtracts_means
        if "pulled_covectors" in vars(self):
            return self.pulled_covectors.kernel(budget=budget, dtype=dtype, may_center=may_center)
        covectors = self._covectors()
        parts = self.linearization.divide_pullback(covectors, budget)
        if len(parts) == 1:
            self.pulled_covectors = parts[0]()
            return self.pulled_covectors.kernel(budget=budget, dtype=dtype, may_center=may_center)
        count = self.samples * len(covectors)
        out = torch.zeros(count, count, dtype=dtype, device=covectors.device)
        self._coverage_of_parts = []
        for pull_back in parts:
            pulled = pull_back()
            pulled.add_kernel(out, budget, may_center=may_center)
            self._coverage_of_parts += pulled.coverage
            del pulled  # before the next part is pulled back
        return mirror_lower_triangle(out)

    def project(self, v: Tensor) -> Tensor:
        """A v from the pulled-back blocks, or by a forward-mode pass if those were not kept."""
        if self._coverage_of_parts:
            return self.push(v)
        values = self.pulled_covectors.project(v).flatten()
        if self.factor.couples_samples:
            return self.transpose(values)
        return values

    def lift(self, c: Tensor) -> Tensor:
        """Aᵀ c from the pulled-back blocks, or by a reverse-mode pass if those were not kept."""
        if self._coverage_of_parts:
            return self.pull(c)
        if self.factor.couples_samples:
            c = self.factor.apply(self._shape_white(c))
        return self.pulled_covectors.lift(c.reshape(self.pulled_covectors.shape))

    def push(self, v: Tensor) -> Tensor:
        """A v by one forward-mode pass."""
        return self.factor.transpose(self.linearization.jvp(v)).flatten()

    def pull(self, c: Tensor) -> Tensor:
        """Aᵀ c by one reverse-mode pass."""
        return self.linearization.vjp(self.factor.apply(self._shape_white(c)))


class RowStack:
    """The rows of all blocks, one after the other: A, (n, p).

    Args:
        row_blocks: linearized maps with the factors of their metric.
        space: the parameters.
    """

    def __init__(self, row_blocks: Sequence[RowBlock], space: ParameterSpace) -> None:
        self.row_blocks = row_blocks
        self.space = space
        self._block_counts = [block.count for block in row_blocks]
        self.count = sum(self._block_counts)

    def refuse_unusable(self) -> None:
        """Raise where a metric couples the samples of one of several forward calls."""
        if len(self.row_blocks) < 2:
            return
        if any(block.factor.couples_samples for block in self.row_blocks):
            raise PullbackError(
                "The metric couples the samples of one forward call",
                f"the closure made {len(self.row_blocks)} forward calls, whose samples it would "
                "not relate",
                "Pass the whole batch in one call",
            )

    def closed_form(self) -> Any:
        """The Gram of a single map that knows it in closed form; None elsewhere."""
        if len(self.row_blocks) != 1:
            return None
        block = self.row_blocks[0]
        return block.linearization.closed_form(block.factor)

    def choose_rows(self, prefers: str) -> str:
        """How rows that fit the memory are held: as "rows", whatever a solver prefers."""
        del prefers
        return "rows"

    def gather(self, values: Tensor) -> Tensor:
        """The values of all rows, from those of this process's rows."""
        return values

    def sum(self, tensor: Tensor, purpose: str = "sums") -> Tensor:
        """The sum over all processes."""
        del purpose
        return tensor

    def project(self, v: Tensor) -> Tensor:
        """A v: (p,) -> (n,), from the pulled-back blocks."""
        return self.gather(self._join_values([block.project(v) for block in self.row_blocks]))

    def push(self, v: Tensor) -> Tensor:
        """A v: (p,) -> (n,), by a forward-mode pass."""
        return self.gather(self._join_values([block.push(v) for block in self.row_blocks]))

    def _join_values(self, values: Sequence[Tensor]) -> Tensor:
        if len(values) == 1:
            return values[0]
        return torch.cat([self.space.zeros(0), *values])

    def lift(self, c: Tensor) -> Tensor:
        """Aᵀ c: (..., n) -> (..., p), from the pulled-back blocks."""
        return self._lift([block.lift for block in self.row_blocks], c)

    def pull(self, c: Tensor) -> Tensor:
        """Aᵀ c: (..., n) -> (..., p), by a reverse-mode pass."""
        return self._lift([block.pull for block in self.row_blocks], c)

    def _lift(self, lifts: Sequence[Callable[[Tensor], Tensor]], c: Tensor) -> Tensor:
        """Σ Aᵀc over all blocks, with one function each."""
        sums = []
        for coefficients in self.own_rows(c.reshape(-1, self.count)):
            if not lifts:  # a process without samples
                sums.append(self.space.zeros(self.space.size))
                continue
            pieces = coefficients.split(self._block_counts)
            lifted = [lift(piece) for lift, piece in zip(lifts, pieces, strict=True)]
            sums.append(reduce(torch.add, lifted))
        if c.ndim == 1:
            return self.sum(sums[0])
        return self.sum(torch.stack(sums))

    def own_rows(self, values: Tensor) -> Tensor:
        """The columns of (k, n) that belong to this process's rows."""
        return values

    def rows(self) -> Tensor:
        """A, (n, p)."""
        return self._stack_own_rows()

    def _stack_own_rows(self) -> Tensor:
        """This process's rows, those of one block after the other."""
        if len(self.row_blocks) == 1:
            return self.row_blocks[0].rows()
        return self._stack_rows(self.row_blocks, self._block_counts)

    def _stack_rows(
        self, sources: Sequence[RowBlock] | Sequence[Pulled], counts: Sequence[int]
    ) -> Tensor:
        """The rows of one source after the other, each written to its place in one matrix."""
        out = self.space.empty(sum(counts), self.space.size)
        start = 0
        for source, count in zip(sources, counts, strict=True):
            source.write_rows(out[start : start + count])
            start += count
        return out

    def panels(self, budget: int) -> Iterator[Tensor]:
        """This process's rows, as many samples at a time as fit half the budget."""
        itemsize = torch.finfo(self.space.dtype).bits // 8
        for block in self.row_blocks:
            bytes_per_sample = block.count // block.samples * self.space.size * itemsize
            panel = max(1, budget // (2 * bytes_per_sample))
            if block.factor.couples_samples:
                panel = block.samples
            for start in range(0, block.samples, panel):
                yield block.rows(start, min(start + panel, block.samples))

    def kernel(self, budget: int) -> Tensor:
        """A Aᵀ, (n, n)."""
        if len(self.row_blocks) == 1:
            return self.row_blocks[0].kernel(budget)
        return multiply_with_itself([block.pulled_covectors for block in self.row_blocks], budget)

    def dense(self, budget: int) -> Tensor:
        """AᵀA, (p, p), over panels of samples whose rows fit the budget."""
        return self.sum(self._own_dense(budget), "gram")

    def _own_dense(self, budget: int) -> Tensor:
        gram = self.space.zeros(self.space.size, self.space.size)
        for rows in self.panels(budget):
            gram.addmm_(rows.T, rows)
        return gram

    def diagonal(self, budget: int) -> Tensor:
        """The diagonal of AᵀA."""
        diagonal = self.space.zeros(self.space.size)
        for rows in self.panels(budget):
            diagonal += rows.norm(dim=0).square()
        return self.sum(diagonal)


def multiply_with_itself(pulled: Sequence[Pulled], budget: int) -> Tensor:
    """A Aᵀ from all blocks; of two products A_i A_jᵀ and A_j A_iᵀ one is computed."""
    count = len(pulled)
    tiles: dict[tuple[int, int], Tensor] = {}
    for i in range(count):
        tiles[i, i] = pulled[i].kernel(budget=budget)
        for j in range(i):
            tiles[i, j] = pulled[i].kernel(pulled[j], budget=budget)
            tiles[j, i] = tiles[i, j].T
    if count == 1:
        return tiles[0, 0]
    lines = []
    for i in range(count):
        lines.append(torch.cat([tiles[i, j] for j in range(count)], 1))
    return torch.cat(lines)


def coverage(row_blocks: Sequence[RowBlock]) -> tuple[Covered, ...]:
    """How each parameter's share of the first block was computed, if it was pulled back."""
    if not row_blocks:
        return ()
    return tuple(row_blocks[0].coverage)
