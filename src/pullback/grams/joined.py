r"""The Gram of rows that live on several processes, A = (A_0; A_1; …), held alike by all of them.

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
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from .._core.processes import Processes, from_bytes, to_bytes
from .._core.space import ParameterSpace
from .._core.svd import qr
from ..maps import Pulled
from .assemble import Part, choose, dense, panel_bytes, panels, squares
from .base import Gram
from .forms import Dense, Kernel, Operator, Panels, Rows


class Stack:
    """The rows of all processes: those of this one, and where they stand among all.

    Args:
        parts: this process's, none where it has no samples.
        space: the parameters.
        processes: which all make a stack at once.
        model: whose layers the rows may refer to; every process has its own.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        space: ParameterSpace,
        processes: Processes,
        model: nn.Module | None = None,
    ) -> None:
        self.parts, self.space, self.processes, self._model = parts, space, processes, model
        own = torch.tensor([sum(part.count for part in parts)], device=processes.device)
        counts = [int(n) for n in processes.gather([own])[0]]
        #: the rows of each process among all n
        self.places = [slice(a, b) for a, b in pairwise(accumulate(counts, initial=0))]
        self.count = sum(counts)

    def gather(self, c: Tensor | None) -> Tensor | None:
        """(n_k,) of each process -> (n,)."""
        return None if c is None else self.processes.gather([c])[0]

    def project(self, v: Tensor, by: str = "project") -> Tensor:
        """A v: (p,) -> (n,)."""
        shares = [getattr(part, by)(v) for part in self.parts]
        return self.processes.gather([torch.cat([self.space.zeros(0), *shares])])[0]

    def lift(self, c: Tensor, by: str = "lift") -> Tensor:
        """Aᵀ c: (..., n) -> (..., p), one sum over the processes."""
        own = c.reshape(-1, self.count)[:, self.places[self.processes.rank]]
        counts = [part.count for part in self.parts]
        shares = self.space.zeros(len(own), self.space.size)
        for share, row in zip(shares, own, strict=True):
            for part, piece in zip(self.parts, row.split(counts) if counts else (), strict=True):
                share += getattr(part, by)(piece)
        return self.processes.sum([shares])[0].view(*c.shape[:-1], self.space.size)

    def own_rows(self) -> Tensor:
        """A_k, (n_k, p)."""
        with self.processes.together():
            rows = [part.rows() for part in self.parts]
            return torch.cat([self.space.zeros(0, self.space.size), *rows])

    def triangle(self, white: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stacked R_k, and the Q_kᵀr_k; rows as they are where a process has few."""
        a = self.own_rows()
        with self.processes.together():
            if len(a) > self.space.size:
                # rounding R in the end is all that single precision loses
                q, triangle = qr(a.double())
                a = triangle.to(a.dtype)
                white = None if white is None else q.transposed(white.double()).to(white.dtype)
        if white is None:
            return self.processes.gather([a], "rows")[0], None
        rows, values = self.processes.gather([a, white], "rows")
        return rows, values

    def pulled(self) -> list[list[Pulled]]:
        """What the rows of every process are made of."""
        with self.processes.together():
            own = [part.pulled for part in self.parts]
        layers = () if self._model is None else self._model.named_modules()
        shared: dict[str, object] = {f"module {name}": module for name, module in layers}
        return gather_objects(
            self.processes, own, {**shared, "space": self.space}, self.space.device
        )

    def rows(self) -> Tensor:
        """A, (n, p), from what it is made of."""
        found = [x.rows() for own in self.pulled() for x in own]
        return torch.cat([self.space.zeros(0, self.space.size), *found])

    def kernel(self, budget: int) -> Tensor:
        """A Aᵀ, (n, n): every process multiplies its tiles."""
        found, rank = self.pulled(), self.processes.rank
        with self.processes.together():
            tiles = [
                _tile(found[rank], found[j], self._shape(rank, j), budget, self.space)
                for k, j in self._pairs()
                if k == rank
            ]
            flat = torch.cat([self.space.zeros(0), *(tile.flatten() for tile in tiles)])
        out = self.space.zeros(self.count, self.count)
        every = [list(_split(flat, shapes)) for flat, shapes in self._gathered(flat)]
        for k, j in self._pairs():
            tile = every[k].pop(0)
            out[self.places[k], self.places[j]] = tile
            if k != j:
                out[self.places[j], self.places[k]] = tile.T
        return out

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """One of (k, j) and (j, k) for all processes; each is first in as many as the others."""
        size = self.processes.size
        for k in range(size):
            for step in range(size // 2 + 1):
                if 2 * step < size or k < step:
                    yield k, (k + step) % size

    def _shape(self, k: int, j: int) -> tuple[int, int]:
        one, two = self.places[k], self.places[j]
        return one.stop - one.start, two.stop - two.start

    def _gathered(self, flat: Tensor) -> Iterator[tuple[Tensor, list[tuple[int, int]]]]:
        """Every process's tiles, with their shapes."""
        found = self.processes.parts([flat], "kernel")[0]
        for k, flat in enumerate(found):
            yield flat, [self._shape(k, j) for first, j in self._pairs() if first == k]

    def dense(self, budget: int) -> Tensor:
        """Σ_k A_kᵀA_k, (p, p)."""
        with self.processes.together():
            own = dense(self.parts, self.space, budget)
        return self.processes.sum([own], "gram")[0]

    def squares(self, budget: int) -> Tensor:
        """The diagonal of AᵀA."""
        return self.processes.sum([squares(self.parts, self.space, budget)])[0]


class StackedKernel(Kernel):
    """The kernel of a stack; many lifts are summed at once."""

    def __init__(self, stack: Stack, budget: int) -> None:
        super().__init__(
            stack.kernel(budget),
            stack.project,
            stack.lift,
            stack.space.size,
            lambda: stack.squares(budget),
        )
        self._stack = stack

    def rows(self) -> Tensor:
        return self._stack.rows()

    def lift_rows(self, c: Tensor) -> Tensor:
        return self._lift(c)


def assemble_stack(
    stack: Stack, white: Tensor | None, form: str, budget: int, prefers: str = "small"
) -> tuple[Gram, Tensor | None]:
    """The Gram of all processes' rows, and the r that goes with it.

    Args:
        stack: the rows.
        white: r of this process's rows; None on all processes or on none.
        form, budget, prefers: as for `assemble`; a map's own closed form is not used.
    """
    space, n, p = stack.space, stack.count, stack.space.size
    _refuse(stack)
    if form == "auto":
        form = choose(n, p, torch.finfo(space.dtype).bits // 8, budget, prefers)
    if prefers == "panels" and form in ("rows", "panels"):
        found = Panels(
            partial(panels, stack.parts, space, panel_bytes(space, budget)),
            stack.project, stack.lift, (n, p),
            space.dtype, space.device, lambda a: stack.processes.gather([a], "rows")[0],
        )  # fmt: skip
        return found, stack.gather(white)
    if form == "rows" and p <= n:
        a, white = stack.triangle(white)
        return Rows(a), white
    white = stack.gather(white)
    if form == "rows":
        return Rows(stack.rows()), white
    if form == "dense":
        return Dense(stack.dense(budget), n), white
    if form == "kernel":
        return StackedKernel(stack, budget), white

    def push(v: Tensor) -> Tensor:
        return stack.project(v, "push")

    def pull(c: Tensor) -> Tensor:
        return stack.lift(c, "pull")

    return Operator(push, pull, (n, p), space.dtype, space.device), white


def _refuse(stack: Stack) -> None:
    if not stack.count:
        raise PullbackError(
            "The batch is empty", "no process has a sample", "Skip batches without samples"
        )
    if not stack.processes.agree(not any(part.factor.couples_samples for part in stack.parts)):
        raise PullbackError(
            "The metric couples the samples of a batch",
            f"they are on {stack.processes.size} processes, and it relates those of one alone",
            "Train on one process, or use a metric that measures samples one by one",
        )


def _tile(
    mine: Sequence[Pulled],
    theirs: Sequence[Pulled],
    shape: tuple[int, int],
    budget: int,
    space: ParameterSpace,
) -> Tensor:
    """A_k A_jᵀ, by the parts of both."""
    if 0 in shape:
        return space.zeros(*shape)
    lines = [
        torch.cat([x.kernel(None if x is y else y, budget=budget) for y in theirs], 1) for x in mine
    ]
    return torch.cat(lines)


def _split(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
    pieces = flat.split([a * b for a, b in shapes])
    for piece, shape in zip(pieces, shapes, strict=True):
        yield piece.view(shape)


T = TypeVar("T")


def gather_objects(
    processes: Processes, value: T, own: Mapping[str, object], device: torch.device
) -> list[T]:
    """Return every process's value, with its tensors on this device.

    Args:
        processes: which all call this.
        value: what can be pickled.
        own: objects that a value refers to and every process has its own of, by name.
        device: of the buffer that is sent.
    """
    if processes.alone:
        return [value]
    stream = io.BytesIO()
    packer = _Packer(stream, own)
    packer.dump(value)
    given = [t.to(device) for t in packer.tensors]
    kinds = [(tuple(t.shape), t.dtype) for t in given]
    buffers = processes.parts([to_bytes(given, device)], "objects")[0]
    found = processes.values((stream.getvalue(), kinds), "objects")
    out = []
    for (code, kinds), buffer in zip(found, buffers, strict=True):
        like = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
        out.append(_Unpacker(io.BytesIO(code), own, from_bytes(buffer, like)).load())
    return out


class _Packer(pickle.Pickler):
    """Leaves tensors, and what every process has, out of the pickle."""

    def __init__(self, stream: io.BytesIO, own: Mapping[str, object]) -> None:
        super().__init__(stream)
        self._names = {id(value): name for name, value in own.items()}
        self._index: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> str | int | None:
        if id(obj) in self._names:
            return self._names[id(obj)]
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._index:  # the list keeps it alive, so that its id is its own
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)]


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, own: Mapping[str, object], tensors: list[Tensor]
    ) -> None:
        super().__init__(stream)
        self._own, self._tensors = own, tensors

    def persistent_load(self, pid: Any) -> Any:
        return self._own[pid] if isinstance(pid, str) else self._tensors[pid]
