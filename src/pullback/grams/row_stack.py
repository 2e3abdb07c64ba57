r"""The rows A = SᵀJ that a Gram is made of: blocks of one process, or of several.

Of several processes A = (A_0; A_1; …) is held alike by all of them:

    parameter space   A_k = Q_k R_k on each process: the stacked R_k have the Gram and the
                      spectrum of A, and Q_kᵀr_k stands for r_k (tall-skinny QR); where rows do
                      not fit, Σ_k A_kᵀA_k is summed
    sample space      what A_k is made of (inputs a, cotangents δ) is gathered, tiles A_k A_jᵀ of
                      the kernel are shared out, and Aᵀc = Σ_k A_kᵀc_k is summed

Everything gathered or summed has the same bits on all processes, so that they solve alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor, nn

from .._core.factor import Factor
from .._core.processes import Processes
from .._core.space import ParameterSpace
from .._core.svd import qr
from ..maps import Linearization, Pulled, identity_covectors
from .row_exchange import gather_pulled


class RowBlock:
    """One linearized map with the factor of its metric: the rows A = SᵀJ of its samples."""

    def __init__(self, linearization: Linearization, factor: Factor) -> None:
        self.linearization = linearization
        self.factor = factor
        self.samples = linearization.value.shape[0]
        self.count = self.samples * prod(factor.white)

    @cached_property
    def pulled(self) -> Pulled:
        """The covectors S (or, where S couples samples, the coordinates) pulled back."""
        value = self.linearization.value
        if self.factor.couples_samples:
            return self.linearization.pullback(identity_covectors(value))
        return self.linearization.pullback(self.factor.covectors(value))

    @property
    def used_structure(self) -> bool:
        """Whether rows were pulled back through layers, and not by autograd alone."""
        return "pulled" in vars(self) and bool(self.pulled.coverage)

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
            return self.transpose(self.pulled.rows().T).T
        if start == 0 and stop in (None, self.samples):
            return self.pulled.rows()
        return self.pulled.narrow(start, self.samples if stop is None else stop).rows()

    def kernel(self, budget: int) -> Tensor:
        """A Aᵀ, (n, n)."""
        kernel = self.pulled.kernel(budget=budget)
        if self.factor.couples_samples:
            kernel = self.transpose(self.transpose(kernel).T)
        return kernel

    def project(self, v: Tensor) -> Tensor:
        """A v from the pulled-back blocks."""
        values = self.pulled.project(v).flatten()
        if self.factor.couples_samples:
            return self.transpose(values)
        return values

    def lift(self, c: Tensor) -> Tensor:
        """Aᵀ c from the pulled-back blocks."""
        if self.factor.couples_samples:
            c = self.factor.apply(self._shape_white(c))
        return self.pulled.lift(c.reshape(self.pulled.shape))

    def push(self, v: Tensor) -> Tensor:
        """A v by one forward-mode pass."""
        return self.factor.transpose(self.linearization.jvp(v)).flatten()

    def pull(self, c: Tensor) -> Tensor:
        """Aᵀ c by one reverse-mode pass."""
        return self.linearization.vjp(self.factor.apply(self._shape_white(c)))


class RowStack:
    """The rows of all processes: those of this one, and where they stand among all.

    Args:
        row_blocks: this process's, none where it has no samples.
        space: the parameters.
        processes: which all make a stack at once.
        model: whose layers the rows may refer to; every process has its own.
    """

    def __init__(
        self,
        row_blocks: Sequence[RowBlock],
        space: ParameterSpace,
        processes: Processes,
        model: nn.Module | None = None,
    ) -> None:
        self.row_blocks = row_blocks
        self.space = space
        self.processes = processes
        self._model = model
        self._block_counts = [block.count for block in row_blocks]
        counts = [sum(self._block_counts)]
        if not processes.is_single:
            counts = processes.gather_objects(counts[0])
        #: the rows of each process among all n
        self.process_rows = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]
        self.count = sum(counts)

    def project(self, v: Tensor) -> Tensor:
        """A v: (p,) -> (n,), from the pulled-back blocks."""
        return self._gather([block.project(v) for block in self.row_blocks])

    def push(self, v: Tensor) -> Tensor:
        """A v: (p,) -> (n,), by a forward-mode pass."""
        return self._gather([block.push(v) for block in self.row_blocks])

    def _gather(self, values: list[Tensor]) -> Tensor:
        """The values of this process's rows, joined with those of the others."""
        return self.processes.gather([torch.cat([self.space.zeros(0), *values])])[0]

    def lift(self, c: Tensor) -> Tensor:
        """Aᵀ c: (..., n) -> (..., p), from the pulled-back blocks."""
        return self._lift([block.lift for block in self.row_blocks], c)

    def pull(self, c: Tensor) -> Tensor:
        """Aᵀ c: (..., n) -> (..., p), by a reverse-mode pass."""
        return self._lift([block.pull for block in self.row_blocks], c)

    def _lift(self, lifts: Sequence[Callable[[Tensor], Tensor]], c: Tensor) -> Tensor:
        """Σ Aᵀc over all blocks with one function each; one sum over the processes."""
        own_rows = self.process_rows[self.processes.rank]
        sums = []
        for coefficients in c.reshape(-1, self.count)[:, own_rows]:
            if not lifts:  # a process without samples
                sums.append(self.space.zeros(self.space.size))
                continue
            pieces = coefficients.split(self._block_counts)
            lifted = [lift(piece) for lift, piece in zip(lifts, pieces, strict=True)]
            sums.append(reduce(torch.add, lifted))
        total = sums[0] if c.ndim == 1 else torch.stack(sums)
        return self.processes.sum([total])[0]

    def triangle(self, white: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stacked R_k, and the Q_kᵀr_k; rows as they are where a process has few."""
        with self.processes.raise_together():
            rows = self._join([block.rows() for block in self.row_blocks])
            if len(rows) > self.space.size:
                # in double precision, so that single precision loses no more than R's rounding
                q, triangle = qr(rows.double())
                rows = triangle.to(rows.dtype)
                if white is not None:
                    white = q.apply_transpose(white.double()).to(white.dtype)
        if white is None:
            return self.processes.gather([rows], "rows")[0], None
        all_rows, all_white = self.processes.gather([rows, white], "rows")
        return all_rows, all_white

    def rows(self) -> Tensor:
        """A, (n, p); of several processes from what it is made of."""
        if self.processes.is_single:
            return self._join([block.rows() for block in self.row_blocks])
        rows = []
        for pulled_of_process in self._gather_pulled():
            rows += [pulled.rows() for pulled in pulled_of_process]
        return self._join(rows)

    def _gather_pulled(self) -> list[list[Pulled]]:
        """What the rows of every process are made of."""
        with self.processes.raise_together():
            pulled = [block.pulled for block in self.row_blocks]
        return gather_pulled(pulled, self.space, self.processes, self._model)

    def _join(self, rows: Sequence[Tensor]) -> Tensor:
        if len(rows) == 1:
            return rows[0]
        return torch.cat([self.space.zeros(0, self.space.size), *rows])

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
        """A Aᵀ, (n, n): every process multiplies its tiles."""
        if self.processes.is_single and len(self.row_blocks) == 1:
            return self.row_blocks[0].kernel(budget)
        if self.processes.is_single:
            pulled = [block.pulled for block in self.row_blocks]
            return _multiply_with_itself(pulled, budget)
        return self._exchange_tiles(self._gather_pulled(), budget)

    def _exchange_tiles(self, pulled: Sequence[list[Pulled]], budget: int) -> Tensor:
        """The kernel of several processes, each of which multiplies its share of the tiles."""
        pairs = _share_tiles(self.processes.size)
        kernel = self.space.zeros(self.count, self.count)
        tiles = [kernel[self.process_rows[k], self.process_rows[j]] for k, j in pairs]
        with self.processes.raise_together():
            for tile, (k, j) in zip(tiles, pairs, strict=True):
                if k != self.processes.rank or not tile.numel():
                    continue
                if k == j:
                    tile.copy_(_multiply_with_itself(pulled[k], budget))
                else:
                    tile.copy_(_multiply(pulled[k], pulled[j], budget))
        self.processes.exchange(tiles, [owner for owner, _ in pairs], "kernel")
        for tile, (k, j) in zip(tiles, pairs, strict=True):
            if k != j:
                kernel[self.process_rows[j], self.process_rows[k]] = tile.T
        return kernel

    def dense(self, budget: int) -> Tensor:
        """AᵀA = Σ_k A_kᵀA_k, (p, p), over panels of samples whose rows fit the budget."""
        gram = self.space.zeros(self.space.size, self.space.size)
        with self.processes.raise_together():
            for rows in self.panels(budget):
                gram.addmm_(rows.T, rows)
        return self.processes.sum([gram], "gram")[0]

    def diagonal(self, budget: int) -> Tensor:
        """The diagonal of AᵀA."""
        diagonal = self.space.zeros(self.space.size)
        for rows in self.panels(budget):
            diagonal += rows.norm(dim=0).square()
        return self.processes.sum([diagonal])[0]


def _share_tiles(size: int) -> list[tuple[int, int]]:
    """Tiles (k, j) of a symmetric kernel of `size` processes; process k multiplies (k, j).

    One of (k, j) and (j, k) is in the list, and each process is first in as many as the others.
    """
    tiles = []
    for k in range(size):
        for distance in range(size // 2 + 1):
            # at half of an even size both ends would count the pair
            if 2 * distance < size or k < distance:
                tiles.append((k, (k + distance) % size))
    return tiles


def _multiply(left: Sequence[Pulled], right: Sequence[Pulled], budget: int) -> Tensor:
    """A_k A_jᵀ from the blocks of two processes."""
    rows = []
    for x in left:
        rows.append(torch.cat([x.kernel(y, budget=budget) for y in right], 1))
    return torch.cat(rows)


def _multiply_with_itself(pulled: Sequence[Pulled], budget: int) -> Tensor:
    """A_k A_kᵀ from the blocks of one process; only half of the products are computed."""
    count = len(pulled)
    tiles: dict[tuple[int, int], Tensor] = {}
    for i in range(count):
        tiles[i, i] = pulled[i].kernel(budget=budget)
        for j in range(i):
            tiles[i, j] = pulled[i].kernel(pulled[j], budget=budget)
            tiles[j, i] = tiles[i, j].T
    if count == 1:
        return tiles[0, 0]
    return torch.cat([torch.cat([tiles[i, j] for j in range(count)], 1) for i in range(count)])
