"""The forms a Gram is held in: rows A, dense AᵀA, kernel AAᵀ, or products alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.products import gram
from .base import FactoredGram, Gram, Structure

_EXACT_TRACE = 256  # rows up to which the trace of an operator is computed and not estimated
_PROBES = 32


def _refuse_empty(count: int, size: int) -> tuple[int, int]:
    """Raise for a Gram without rows or parameters, which no solver has a direction for."""
    if not count or not size:
        raise PullbackError(
            "The Gram is empty",
            f"it has {count} rows and {size} parameters",
            "Leave out empty batches, and parameters without entries",
        )
    return count, size


class Rows(FactoredGram):
    """G = AᵀA held as the matrix A.

    >>> a = torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
    >>> Rows(a).matvec(torch.ones(3))
    tensor([2., 4., 2.])
    """

    def __init__(self, a: Tensor) -> None:
        if a.ndim != 2:
            raise PullbackError(
                "Rows needs a matrix",
                f"got shape {tuple(a.shape)}",
                "Pass A of shape (rows, parameters)",
            )
        self._a = a
        self.count, self.size = _refuse_empty(*a.shape)
        self.dtype, self.device = a.dtype, a.device
        self.structure = Structure("rows", factored=True, low_rank=self.count < self.size)

    def project(self, v: Tensor) -> Tensor:
        return self._a @ v

    def lift(self, c: Tensor) -> Tensor:
        return self._a.T @ c

    def lift_rows(self, c: Tensor) -> Tensor:
        return c @ self._a

    def rows(self) -> Tensor:
        return self._a

    def row_norms(self) -> Tensor:
        return self._a.norm(dim=1)

    def kernel(self) -> Tensor:
        return gram(self._a)

    def dense(self) -> Tensor:
        return gram(self._a.T)

    def diagonal(self) -> Tensor:
        return self._a.norm(dim=0).square()

    def trace(self) -> Tensor:
        return self._a.square().sum()


class Dense(Gram):
    """G held as a matrix; A is not kept, so its condition is already squared."""

    def __init__(self, g: Tensor, count: int | None = None) -> None:
        if g.ndim != 2 or g.shape[0] != g.shape[1]:
            raise PullbackError(
                "Dense needs a square matrix",
                f"got shape {tuple(g.shape)}",
                "Pass G of shape (p, p)",
            )
        self._g = g
        self.size = _refuse_empty(1, len(g))[1]
        self.count = self.size if count is None else count
        self.dtype, self.device = g.dtype, g.device
        self.structure = Structure("dense", factored=False, low_rank=self.count < self.size)

    def matvec(self, v: Tensor) -> Tensor:
        return self._g @ v

    def dense(self) -> Tensor:
        return self._g


class Operator(FactoredGram):
    """G by products with A and Aᵀ alone (forward- and reverse-mode passes)."""

    def __init__(
        self,
        project: Callable[[Tensor], Tensor],
        lift: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._project, self._lift = project, lift
        self.count, self.size = _refuse_empty(*shape)
        self.dtype, self.device = dtype, device
        self.structure = Structure("operator", factored=True, low_rank=self.count < self.size)

    def project(self, v: Tensor) -> Tensor:
        return self._project(v)

    def lift(self, c: Tensor) -> Tensor:
        return self._lift(c)

    def kernel(self) -> Tensor:
        eye = torch.eye(self.count, dtype=self.dtype, device=self.device)
        return torch.stack([self.project(self.lift(e)) for e in eye])

    def diagonal(self) -> Tensor:
        """By min(n, p) products, without holding A."""
        unit = torch.zeros(min(self.count, self.size), dtype=self.dtype, device=self.device)
        by_rows = self.count <= self.size
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for i in range(len(unit)):
            unit.zero_()[i] = 1
            if by_rows:
                total += self.lift(unit).square()
            else:
                total[i] = self.project(unit).square().sum()
        return total

    def trace(self) -> Tensor:
        """tr G: exact for few rows, else estimated from seeded signs v as the mean of vᵀG v.

        The signs belong to the parameters, so the estimate depends on G alone: it does not change
        when the batch is repeated.
        """
        if self.count <= _EXACT_TRACE:
            return self.rows().square().sum()
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for _ in range(_PROBES):
            signs = torch.randint(0, 2, (self.size,), generator=generator) * 2 - 1
            total += self.project(signs.to(self.device, self.dtype)).square().sum()
        return total / _PROBES


class Panels(Operator):
    """G by products with A and Aᵀ, and A itself a panel of rows at a time, never held whole."""

    def __init__(
        self,
        panels: Callable[[], Iterator[Tensor]],
        project: Callable[[Tensor], Tensor],
        lift: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        gather: Callable[[Tensor], Tensor] = lambda a: a,
    ) -> None:
        super().__init__(project, lift, shape, dtype, device)
        self._panels, self._gather = panels, gather

    def compressed(self, columns: Callable[[Tensor], Tensor]) -> Tensor:
        empty = columns(torch.zeros(0, self.size, dtype=self.dtype, device=self.device))
        return self._gather(torch.cat([empty, *(columns(rows) for rows in self._panels())]))


class Kernel(Operator):
    """G by its sample-space twin K = AAᵀ, held as a matrix, with products by A and Aᵀ."""

    def __init__(
        self,
        kernel: Tensor,
        project: Callable[[Tensor], Tensor],
        lift: Callable[[Tensor], Tensor],
        size: int,
        diagonal: Callable[[], Tensor] | None = None,
    ) -> None:
        super().__init__(project, lift, (len(kernel), size), kernel.dtype, kernel.device)
        self._kernel, self._diagonal = kernel, diagonal
        self.structure = Structure("kernel", factored=True, low_rank=self.count < self.size)

    def kernel(self) -> Tensor:
        return self._kernel

    def diagonal(self) -> Tensor:
        return super().diagonal() if self._diagonal is None else self._diagonal()

    def row_norms(self) -> Tensor:
        return self._kernel.diagonal().clamp(min=0).sqrt()

    def trace(self) -> Tensor:
        return self._kernel.diagonal().sum()
