r"""The rows A = SᵀJ that a Gram is made of: parts of one process, or of several.

Of several processes A = (A_0; A_1; …) is held alike by all of them:

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
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .._core.buffers import from_bytes, to_bytes
from .._core.factor import Factor
from .._core.processes import Processes
from .._core.space import ParameterSpace
from .._core.svd import qr
from ..maps import Linearization, Pulled, identity_covectors


class Part:
    """One linearized map with the factor of its metric: the rows A = SᵀJ of its samples."""

    def __init__(self, linear: Linearization, factor: Factor) -> None:
        self.linear, self.factor = linear, factor
        self.count = linear.value.shape[0] * prod(factor.white)

    @cached_property
    def pulled(self) -> Pulled:
        """The covectors S (or, where S couples samples, the coordinates) pulled back."""
        value = self.linear.value
        coupled = self.factor.couples_samples
        return self.linear.pullback(
            identity_covectors(value) if coupled else self.factor.covectors(value)
        )

    @property
    def used_structure(self) -> bool:
        """Whether rows were pulled back through layers, and not by autograd alone."""
        return "pulled" in vars(self) and bool(self.pulled.coverage)

    def _white(self, c: Tensor) -> Tensor:
        return c.reshape(*c.shape[:-1], self.linear.value.shape[0], *self.factor.white)

    def transpose(self, v: Tensor) -> Tensor:
        """Sᵀ on the last axis of v, (..., N·|event|) -> (..., n)."""
        shaped = v.reshape(*v.shape[:-1], *self.linear.value.shape)
        return self.factor.transpose(shaped).flatten(v.ndim - 1)

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """A, (n, p), or its rows of the samples in [start, stop)."""
        if self.factor.couples_samples:
            return self.transpose(self.pulled.rows().T).T
        stop = self.linear.value.shape[0] if stop is None else stop
        whole = (start, stop) == (0, self.linear.value.shape[0])
        return (self.pulled if whole else self.pulled.narrow(start, stop)).rows()

    def project(self, v: Tensor) -> Tensor:
        """A v from the pulled-back blocks."""
        out = self.pulled.project(v).flatten()
        return self.transpose(out) if self.factor.couples_samples else out

    def lift(self, c: Tensor) -> Tensor:
        """Aᵀ c from the pulled-back blocks."""
        if self.factor.couples_samples:
            c = self.factor.apply(self._white(c))
        return self.pulled.lift(c.reshape(self.pulled.shape))

    def push(self, v: Tensor) -> Tensor:
        """A v by one forward-mode pass."""
        return self.factor.transpose(self.linear.jvp(v)).flatten()

    def pull(self, c: Tensor) -> Tensor:
        """Aᵀ c by one reverse-mode pass."""
        return self.linear.vjp(self.factor.apply(self._white(c)))


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
        self._counts = [part.count for part in parts]
        own = torch.tensor([sum(self._counts)], device=processes.device)
        counts = [int(n) for n in processes.gather([own])[0]]
        #: the rows of each process among all n
        self.places = [slice(a, b) for a, b in pairwise(accumulate(counts, initial=0))]
        self.count = sum(counts)

    def project(self, v: Tensor, by: str = "project") -> Tensor:
        """A v: (p,) -> (n,), by a method of the parts: `project`, or a forward-mode pass `push`."""
        shares = [getattr(part, by)(v) for part in self.parts]
        return self.processes.gather([torch.cat([self.space.zeros(0), *shares])])[0]

    def lift(self, c: Tensor, by: str = "lift") -> Tensor:
        """Aᵀ c: (..., n) -> (..., p), by `lift` or `pull`; one sum over the processes."""
        shares = []
        for row in c.reshape(-1, self.count)[:, self.places[self.processes.rank]]:
            pieces = zip(self.parts, row.split(self._counts) if self.parts else (), strict=True)
            own = [getattr(part, by)(piece) for part, piece in pieces]
            shares.append(reduce(torch.add, own) if own else self.space.zeros(self.space.size))
        return self.processes.sum([shares[0] if c.ndim == 1 else torch.stack(shares)])[0]

    def triangle(self, white: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stacked R_k, and the Q_kᵀr_k; rows as they are where a process has few."""
        with self.processes.raise_together():
            a = self._joined([part.rows() for part in self.parts])
            if len(a) > self.space.size:
                # rounding R in the end is all that single precision loses
                q, triangle = qr(a.double())
                a = triangle.to(a.dtype)
                white = None if white is None else q.transposed(white.double()).to(white.dtype)
        found = self.processes.gather([a] if white is None else [a, white], "rows")
        return found[0], None if white is None else found[1]

    def pulled(self) -> list[list[Pulled]]:
        """What the rows of every process are made of."""
        with self.processes.raise_together():
            own = [part.pulled for part in self.parts]
        if self.processes.is_single:
            return [own]
        # a pickle without tensors, which travel as bytes, and without what every process has
        layers = () if self._model is None else self._model.named_modules()
        shared: dict[str, object] = {f"module {name}": module for name, module in layers}
        shared["space"], device, stream = self.space, self.space.device, io.BytesIO()
        packer = _Packer(stream, shared)
        packer.dump(own)
        given = [t.to(device) for t in packer.tensors]
        kinds = [(tuple(t.shape), t.dtype) for t in given]
        buffers = self.processes.gather_parts([to_bytes(given, device)], "objects")[0]
        found = self.processes.gather_objects((stream.getvalue(), kinds), "objects")
        out: list[list[Pulled]] = []
        for (code, kinds), buffer in zip(found, buffers, strict=True):
            like = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
            out.append(_Unpacker(io.BytesIO(code), shared, from_bytes(buffer, like)).load())
        return out

    def rows(self) -> Tensor:
        """A, (n, p); of several processes from what it is made of."""
        if self.processes.is_single:
            return self._joined([part.rows() for part in self.parts])
        return self._joined([x.rows() for own in self.pulled() for x in own])

    def _joined(self, rows: Sequence[Tensor]) -> Tensor:
        if len(rows) == 1:
            return rows[0]
        return torch.cat([self.space.zeros(0, self.space.size), *rows])

    def panels(self, budget: int) -> Iterator[Tensor]:
        """This process's rows, as many samples at a time as fit half the budget."""
        itemsize = torch.finfo(self.space.dtype).bits // 8
        for part in self.parts:
            samples = part.linear.value.shape[0]
            per_sample = part.count // samples * self.space.size * itemsize
            panel = samples if part.factor.couples_samples else max(1, budget // (2 * per_sample))
            for a in range(0, samples, panel):
                yield part.rows(a, min(a + panel, samples))

    def kernel(self, budget: int) -> Tensor:
        """A Aᵀ, (n, n): every process multiplies its tiles."""
        found, rank = self.pulled(), self.processes.rank
        if self.processes.is_single:
            part, kernel = self.parts[0], _tile(found[0], found[0], budget)
            coupled = part.factor.couples_samples
            return part.transpose(part.transpose(kernel).T) if coupled else kernel
        size = self.processes.size
        # one of (k, j) and (j, k) for all processes; each is first in as many as the others
        steps = [(k, step) for k in range(size) for step in range(size // 2 + 1)]
        pairs = [(k, (k + step) % size) for k, step in steps if 2 * step < size or k < step]
        out = self.space.zeros(self.count, self.count)
        tiles = [out[self.places[k], self.places[j]] for k, j in pairs]
        with self.processes.raise_together():
            for tile, (k, j) in zip(tiles, pairs, strict=True):
                if k == rank and tile.numel():
                    tile.copy_(_tile(found[k], found[j], budget))
        self.processes.exchange(tiles, [k for k, _ in pairs], "kernel")
        for tile, (k, j) in zip(tiles, pairs, strict=True):
            if k != j:
                out[self.places[j], self.places[k]] = tile.T
        return out

    def dense(self, budget: int) -> Tensor:
        """AᵀA = Σ_k A_kᵀA_k, (p, p), over panels of samples whose rows fit the budget."""
        out = self.space.zeros(self.space.size, self.space.size)
        with self.processes.raise_together():
            for rows in self.panels(budget):
                out.addmm_(rows.T, rows)
        return self.processes.sum([out], "gram")[0]

    def squares(self, budget: int) -> Tensor:
        """The diagonal of AᵀA."""
        out = self.space.zeros(self.space.size)
        for rows in self.panels(budget):
            out += rows.norm(dim=0).square()
        return self.processes.sum([out])[0]


def _tile(one: Sequence[Pulled], two: Sequence[Pulled], budget: int) -> Tensor:
    """A_k A_jᵀ by the parts of both; of a process with itself only half of them are multiplied."""
    same = two is one
    lines = [
        [x.kernel(None if x is y else y, budget=budget) for y in (two[: i + 1] if same else two)]
        for i, x in enumerate(one)
    ]
    if len(one) == len(two) == 1:
        return lines[0][0]
    for i, line in enumerate(lines):
        line += [lines[j][i].T for j in range(len(line), len(two))]
    return torch.cat([torch.cat(line, 1) for line in lines])


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
