r"""Maps φ from parameters to function values, and their tangents.

A *map* is linearized at parameters w and gives z = φ(w) with products by J = dφ_w. Values
have shape (N, *event), samples first, and the rows of J that belong to different samples
are independent of each other's inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.factor import Factor
from .._core.products import (
    add_centered_gram,
    add_cross_gram,
    is_centered_gram_fast,
    mirror_lower_triangle,
)
from .._core.space import ParameterSpace
from .layers.registry import Block, RowsBlock


@dataclass(frozen=True)
class Covered:
    """How one parameter's share of the Gram is computed, and why."""

    name: str
    route: str
    reason: str


class Pulled:
    """R covectors per sample pulled back through J: the matrix A, block by block of parameters.

    Rows are ordered (sample, covector); vectors on the row side have shape (N, R). Where A is at
    hand as a whole, `matrix` (N·R, p), products are with it.
    """

    #: whether only some samples are held at once
    is_chunked: bool = False

    def __init__(
        self,
        space: ParameterSpace,
        shape: tuple[int, int],
        blocks: Sequence[Block],
        coverage: Sequence[Covered] = (),
        matrix: Tensor | None = None,
    ) -> None:
        self.space = space
        self.shape = shape
        self._matrix = matrix
        self.blocks = {tuple(sorted(b.names)): b for b in blocks}
        self.coverage = tuple(coverage)

    @classmethod
    def of_rows(
        cls,
        space: ParameterSpace,
        shape: tuple[int, int],
        matrix: Tensor,
        coverage: Sequence[Covered] = (),
    ) -> Pulled:
        """Return the rows of a matrix A, (N·R, p)."""
        rows = matrix.view(*shape, space.size)
        block = RowsBlock({name: rows[..., at] for name, at in space.slices().items()})
        return cls(space, shape, [block], coverage, matrix)

    def __reduce__(self) -> Any:
        if self._matrix is not None:  # blocks are views of it
            return Pulled.of_rows, (self.space, self.shape, self._matrix, self.coverage)
        return Pulled, (self.space, self.shape, tuple(self.blocks.values()), self.coverage)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are held."""
        if self._matrix is not None:
            return self._matrix.nbytes
        return sum(block.nbytes for block in self.blocks.values())

    def rows(self) -> Tensor:
        """A, materialized: (N·R, p)."""
        if self._matrix is not None:
            return self._matrix
        n, r = self.shape
        out = self.space.empty(n * r, self.space.size)
        self.write_rows(out)
        return out

    def write_rows(self, out: Tensor) -> None:
        """Write A to `out`, (N·R, p), whose rows lie behind each other in memory."""
        if self._matrix is not None:
            out.copy_(self._matrix)
            return
        by_sample = out.view(*self.shape, self.space.size)
        index = self.space.slices()
        independent = set(index)  # parameters on which the values do not depend
        for block in self.blocks.values():
            for name, value in block.rows().items():
                by_sample[..., index[name]] = value
                independent.discard(name)
        for name in independent:
            by_sample[..., index[name]] = 0

    def narrow(self, start: int, stop: int) -> Pulled:
        """Return the rows of the samples in [start, stop)."""
        blocks = [b.narrow(start, stop) for b in self.blocks.values()]
        return Pulled(self.space, (stop - start, self.shape[1]), blocks, self.coverage)

    def trace_covectors(self) -> Pulled:
        """Return one row per sample, for `kernel` only, which is then the trace over all R."""
        blocks = [b.trace_covectors() for b in self.blocks.values()]
        return Pulled(self.space, (self.shape[0], 1), blocks, self.coverage)

    def kernel(
        self,
        other: Pulled | None = None,
        *,
        budget: int = 2**30,
        dtype: torch.dtype | None = None,
        may_center: bool = False,
    ) -> Tensor:
        """A A'ᵀ without A: (N·R, N'·R'), with temporaries of at most `budget` bytes.

        With a `dtype` A Aᵀ is added up in it, as by `add_kernel`, one block of parameters at a
        time.
        """
        count = self.shape[0] * self.shape[1]
        if dtype not in (None, self.space.dtype):
            out = torch.zeros(count, count, dtype=dtype, device=self.space.device)
            self.add_kernel(out, budget, may_center=may_center)
            return mirror_lower_triangle(out)
        if other is None:
            other = self
        if other.is_chunked:
            return other.kernel(self, budget=budget).T
        out = self.space.zeros(count, other.shape[0] * other.shape[1])
        if self._matrix is not None and other._matrix is not None:
            add_cross_gram(out, self._matrix, other._matrix)
        else:
            self._add_cross_kernel(out, other, budget)
        if other is self:
            return mirror_lower_triangle(out)
        return out

    def _add_cross_kernel(self, out: Tensor, other: Pulled, budget: int) -> None:
        """Add A A'ᵀ to `out`, block by block; of A Aᵀ at least the lower triangle."""
        blocks = dict(self.blocks)
        other_blocks = dict(other.blocks)
        for key in self.blocks:
            if type(blocks[key]) is type(other_blocks.get(key)):
                blocks.pop(key).add_gram(out, other_blocks.pop(key), budget)
        # calls with different paths through the model cover the remaining parameters differently
        rows = _collect_rows(blocks.values())
        other_rows = _collect_rows(other_blocks.values())
        for name in rows.keys() & other_rows.keys():
            out += rows[name] @ other_rows[name].T

    def add_kernel(self, out: Tensor, budget: int, *, may_center: bool = False) -> None:
        """Add A Aᵀ to `out`, in the dtype of that, at least on and below the diagonal.

        If `may_center`, the mean over samples may be subtracted from the rows of a parameter. Then
        float32 rows on a GPU are multiplied by tensor cores and added up in float64.
        """
        is_wider = out.dtype != self.space.dtype
        is_centered = may_center and is_wider and is_centered_gram_fast(len(out), out.device)
        for block in self.blocks.values():
            panels = None
            if is_centered:
                panels = block.row_panels(budget)
            if panels is not None:
                for rows in panels:
                    add_centered_gram(out, rows, self.shape[1])
                continue
            converted = block
            if is_wider:
                converted = block.to(out.dtype)
            converted.add_gram(out, converted, budget)
            del converted  # before the next one is made

    def project(self, v: Tensor) -> Tensor:
        """A v: (N, R)."""
        if self._matrix is not None:
            return (self._matrix @ v).view(self.shape)
        pieces = self.space.split(v)
        out = self.space.zeros(*self.shape)
        for block in self.blocks.values():
            out += block.project(pieces)
        return out

    def lift(self, c: Tensor) -> Tensor:
        """Aᵀ c: (p,)."""
        if self._matrix is not None:
            return self._matrix.T @ c.flatten()
        out = self.space.zeros(self.space.size)
        index = self.space.slices()
        for block in self.blocks.values():
            for name, value in block.lift(c).items():
                out[index[name]] = value
        return out


def _collect_rows(blocks: Iterable[Block]) -> dict[str, Tensor]:
    """Return the rows of all blocks, (N·R, numel) by name."""
    collected = {}
    for block in blocks:
        for name, rows in block.rows().items():
            collected[name] = rows.flatten(0, 1)
    return collected


class Linearization(ABC):
    """z = φ(w) and the products with J at w."""

    space: ParameterSpace
    #: z, of shape (N, *event)
    value: Tensor
    #: whether pulling covectors back costs reverse passes alone, and no Jacobian
    structured: bool = False

    @abstractmethod
    def jvp(self, v: Tensor) -> Tensor:
        """J v: (p,) -> (N, *event)."""

    @abstractmethod
    def vjp(self, u: Tensor) -> Tensor:
        """Jᵀ u: (N, *event) -> (p,)."""

    @abstractmethod
    def pullback(self, covectors: Tensor) -> Pulled:
        """The rows u_{n,r}ᵀ J_n for covectors u of shape (R, N, *event)."""

    def divide_pullback(self, covectors: Tensor, budget: int) -> list[Callable[[], Pulled]]:
        """Functions that return the rows of `pullback`, each for some of the parameters.

        There are several where what the rows are made of would exceed `budget` bytes, and each of
        them costs a reverse pass. Whoever needs the parts one after the other saves memory.
        """
        del budget
        return [lambda: self.pullback(covectors)]

    def pullback_factored(self, covectors: Tensor) -> Pulled:
        """Return the same rows, in factors (inputs and cotangents) even if a matrix is smaller."""
        return self.pullback(covectors)

    def kernel(self, other: Linearization | None = None) -> Tensor:
        """J J'ᵀ against another linearization at the same parameters: (N·|event|, N'·|event|)."""
        pulled = self.pullback(identity_covectors(self.value))
        if other is None:
            return pulled.kernel()
        return pulled.kernel(other.pullback(identity_covectors(other.value)))

    def closed_form(self, factor: Factor) -> Any:
        """The Gram Jᵀ S Sᵀ J in closed form, where the map knows one; None elsewhere."""
        return None

    def rows(self) -> Tensor:
        """J, materialized: (N·|event|, p)."""
        return self.pullback(identity_covectors(self.value)).rows()


class Map(ABC):
    """φ: parameters -> function values."""

    @abstractmethod
    def linearize(self, params: Mapping[str, Tensor]) -> Linearization:
        """φ(w) and its tangent at the given parameters."""


def identity_covectors(value: Tensor) -> Tensor:
    """The coordinate covectors of one sample, for every sample: (|event|, N, *event)."""
    n = value.shape[0]
    event = value.shape[1:]
    size = value[0].numel()
    eye = torch.eye(size, dtype=value.dtype, device=value.device)
    return eye.view(size, 1, *event).expand(size, n, *event)
