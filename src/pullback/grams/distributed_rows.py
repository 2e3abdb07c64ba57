r"""The rows of several processes, A = (A_0; A_1; …), held alike by all of them.

    parameter space   A_k = Q_k R_k on each process: the stacked R_k have the Gram and the
                      spectrum of A, and Q_kᵀr_k stands for r_k (tall-skinny QR); where rows do
                      not fit, Σ_k A_kᵀA_k is summed
    sample space      what A_k is made of (inputs a, cotangents δ) is gathered, tiles A_k A_jᵀ of
                      the kernel are shared out, and Aᵀc = Σ_k A_kᵀc_k is summed

Everything gathered or summed has the same bits on all processes, so that they solve alike.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .._core.buffers import from_bytes, to_bytes
from .._core.errors import PullbackError
from .._core.processes import Processes
from .._core.space import ParameterSpace
from .._core.svd import qr
from ..maps import Pulled
from .row_stack import RowBlock, RowStack, multiply_with_itself


class DistributedRowStack(RowStack):
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
        model: nn.Module | None,
    ) -> None:
        super().__init__(row_blocks, space)
        self.processes = processes
        self._model = model
        counts = processes.gather_objects(self.count)
        #: the rows of each process among all n
        self.process_rows = [slice(*ends) for ends in pairwise(accumulate(counts, initial=0))]
        self.count = sum(counts)

    def refuse_unusable(self) -> None:
        """Raise where no process has a sample, or a metric couples those of several."""
        if not self.count:
            raise PullbackError(
                "The batch is empty", "no process has a sample", "Skip batches without samples"
            )
        couples_samples = any(block.factor.couples_samples for block in self.row_blocks)
        if not self.processes.all_agree(not couples_samples):
            raise PullbackError(
                "The metric couples the samples of a batch",
                f"they are on {self.processes.size} processes, and it relates those of one alone",
                "Train on one process, or use a metric that measures samples one by one",
            )

    def closed_form(self) -> Any:
        return None

    def choose_rows(self, prefers: str) -> str:
        """How rows are held: as "panels", as a "triangle", or as "rows" in sample space."""
        if prefers == "panels":
            return "panels"
        return "triangle" if self.space.size <= self.count else "rows"

    def gather(self, values: Tensor) -> Tensor:
        return self.processes.gather([values])[0]

    def sum(self, tensor: Tensor, purpose: str = "sums") -> Tensor:
        return self.processes.sum([tensor], purpose)[0]

    def own_rows(self, values: Tensor) -> Tensor:
        return values[:, self.process_rows[self.processes.rank]]

    def triangle(self, white: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stacked R_k, and the Q_kᵀr_k; rows as they are where a process has few."""
        with self.processes.raise_together():
            rows = self._stack_own_rows()
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
        """A, (n, p), from what the rows of all processes are made of."""
        pulled = [*chain.from_iterable(self._gather_pulled())]
        return self._stack_rows(pulled, [prod(covectors.shape) for covectors in pulled])

    def _gather_pulled(self) -> list[list[Pulled]]:
        """What the rows of every process are made of."""
        with self.processes.raise_together():
            pulled = [block.pulled_covectors for block in self.row_blocks]
        return gather_pulled(pulled, self.space, self.processes, self._model)

    def kernel(self, budget: int) -> Tensor:
        """A Aᵀ, (n, n): every process multiplies its share of the tiles."""
        pulled = self._gather_pulled()
        pairs = _share_tiles(self.processes.size)
        kernel = self.space.zeros(self.count, self.count)
        tiles = [kernel[self.process_rows[k], self.process_rows[j]] for k, j in pairs]
        with self.processes.raise_together():
            for tile, (k, j) in zip(tiles, pairs, strict=True):
                if k != self.processes.rank or not tile.numel():
                    continue
                if k == j:
                    tile.copy_(multiply_with_itself(pulled[k], budget))
                else:
                    tile.copy_(_multiply(pulled[k], pulled[j], budget))
        self.processes.exchange(tiles, [owner for owner, _ in pairs], "kernel")
        for tile, (k, j) in zip(tiles, pairs, strict=True):
            if k != j:
                kernel[self.process_rows[j], self.process_rows[k]] = tile.T
        return kernel

    def _own_dense(self, budget: int) -> Tensor:
        with self.processes.raise_together():
            return super()._own_dense(budget)


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
    lines = []
    for x in left:
        lines.append(torch.cat([x.kernel(y, budget=budget) for y in right], 1))
    return torch.cat(lines)


def gather_pulled(
    pulled: list[Pulled], space: ParameterSpace, processes: Processes, model: nn.Module | None
) -> list[list[Pulled]]:
    """Return what the rows of every process are made of, in the order of ranks.

    The model's layers and the space are not sent: every process has its own.
    """
    shared: dict[str, object] = {"space": space}
    if model is not None:
        for name, module in model.named_modules():
            shared[f"module {name}"] = module
    stream = io.BytesIO()
    pickler = _TensorFreePickler(stream, shared)
    pickler.dump(pulled)
    tensors = [tensor.to(space.device) for tensor in pickler.tensors]
    layouts = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    buffers = processes.gather_parts([to_bytes(tensors, space.device)], "objects")[0]
    pickles = processes.gather_objects((stream.getvalue(), layouts), "objects")
    gathered: list[list[Pulled]] = []
    for (pickled, layouts), buffer in zip(pickles, buffers, strict=True):
        templates = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in layouts]
        received = from_bytes(buffer, templates)
        gathered.append(_TensorFreeUnpickler(io.BytesIO(pickled), shared, received).load())
    return gathered


class _TensorFreePickler(pickle.Pickler):
    """Writes names for shared objects and numbers for tensors, which it lists."""

    def __init__(self, stream: io.BytesIO, shared: Mapping[str, object]) -> None:
        super().__init__(stream)
        self._names = {id(value): name for name, value in shared.items()}
        self._numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> str | int | None:
        if id(obj) in self._names:
            return self._names[id(obj)]
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._numbers:  # the list keeps it alive, so that its id is its own
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _TensorFreeUnpickler(pickle.Unpickler):
    """Reads what `_TensorFreePickler` wrote, with the tensors received beside it."""

    def __init__(
        self, stream: io.BytesIO, shared: Mapping[str, object], tensors: list[Tensor]
    ) -> None:
        super().__init__(stream)
        self._shared = shared
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, str):
            return self._shared[pid]
        return self._tensors[pid]
