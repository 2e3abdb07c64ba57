r"""Grams G = Jᵀ M J = AᵀA: the pullback metric on parameters, and the forms it is held in.

It is held as rows A, dense AᵀA, the kernel AAᵀ, or by products alone. Vectors on the parameter
side have shape (p,), on the row side (n,), where A = SᵀJ is n × p.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.products import gram


@dataclass(frozen=True)
class _OperatorLimits:
    """How far products with A are followed."""

    #: entries of A that are compressed at once: 64 MiB in double precision
    panel_entries: int = 2**23
    #: rows up to which the trace of an operator is computed exactly: as many products, eight times
    #: those of an estimate
    exact_trace_rows: int = 256
    #: random sign vectors that an estimated trace is averaged over: its standard error is at most
    #: √(2/32) = 1/4 of the trace at rank one, and 1/(4√r) where r eigenvalues are alike
    trace_probes: int = 32


_LIMITS = _OperatorLimits()


@dataclass(frozen=True)
class Structure:
    """What a Gram is, as data to query.

    Attributes:
        holds: what is in memory: "rows", "kernel", "dense", or "operator" (products only).
        factored: whether products with A and Aᵀ are available.
        exact: whether this is the pullback metric itself and not an approximation of it.
        kronecker: whether it is a sum of Kronecker products per layer.
        low_rank: whether A has fewer rows than columns.
        closed: whether the model itself gave it in closed form.
        spectral: whether `spectrum` is cheaper than any factorization of a matrix.
    """

    holds: str
    factored: bool
    exact: bool = True
    kronecker: bool = False
    low_rank: bool = False
    closed: bool = False
    spectral: bool = False


class Gram(ABC):
    """A symmetric positive semidefinite operator on parameters; `matvec` is all it must have."""

    #: number of parameters p
    size: int
    #: number of rows n of A, where there is an A
    count: int
    structure: Structure
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def matvec(self, v: Tensor) -> Tensor:
        """G v."""

    def inner_products(self, vectors: Tensor) -> Tensor:
        """x_iᵀG x_j for the rows of (k, p), (k, k)."""
        return vectors @ torch.stack([self.matvec(v) for v in vectors]).T

    def dense(self) -> Tensor:
        """G as a matrix (p, p)."""
        eye = torch.eye(self.size, dtype=self.dtype, device=self.device)
        return torch.stack([self.matvec(e) for e in eye])

    def diagonal(self) -> Tensor:
        """The diagonal of G."""
        return self.dense().diagonal()

    def trace(self) -> Tensor:
        """tr G, a scalar tensor."""
        return self.diagonal().sum()


class FactoredGram(Gram):
    """G = AᵀA with products by A and Aᵀ."""

    @abstractmethod
    def project(self, v: Tensor) -> Tensor:
        """A v: (p,) -> (n,)."""

    @abstractmethod
    def lift(self, c: Tensor) -> Tensor:
        """Aᵀ c: (n,) -> (p,)."""

    def lift_rows(self, c: Tensor) -> Tensor:
        """Aᵀ of every row of c: (k, n) -> (k, p)."""
        return torch.stack([self.lift(row) for row in c])

    def matvec(self, v: Tensor) -> Tensor:
        return self.lift(self.project(v))

    def inner_products(self, vectors: Tensor) -> Tensor:
        images = torch.stack([self.project(v) for v in vectors])
        return images @ images.T

    def rows(self) -> Tensor:
        """A as a matrix (n, p)."""
        eye = torch.eye(self.count, dtype=self.dtype, device=self.device)
        return torch.stack([self.lift(e) for e in eye])

    def compress(self, columns: Callable[[Tensor], Tensor]) -> Tensor:
        """A Ω, (n, k), for Ω as a function of rows: (..., p) -> (..., k)."""
        rows = self.rows()
        return torch.cat(
            [columns(x) for x in rows.split(max(1, _LIMITS.panel_entries // self.size))]
        )

    def kernel(self) -> Tensor:
        """A Aᵀ as a matrix (n, n)."""
        a = self.rows()
        return a @ a.T

    def spectrum(self) -> Any:
        """A = U Σ Vᵀ as an object like `Svd`, where its structure gives it; else None."""
        return None

    def row_norms(self) -> Tensor | None:
        """‖row_i‖ where they are at hand, else None."""
        return None

    def dense(self) -> Tensor:
        a = self.rows()
        return a.T @ a

    def diagonal(self) -> Tensor:
        return self.rows().square().sum(0)


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
        self.dtype = a.dtype
        self.device = a.device
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
        self.dtype = g.dtype
        self.device = g.device
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
        self._project = project
        self._lift = lift
        self.count, self.size = _refuse_empty(*shape)
        self.dtype = dtype
        self.device = device
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
        if self.count <= _LIMITS.exact_trace_rows:
            return self.rows().square().sum()
        generator = torch.Generator().manual_seed(0)
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for _ in range(_LIMITS.trace_probes):
            signs = torch.randint(0, 2, (self.size,), generator=generator) * 2 - 1
            total += self.project(signs.to(self.device, self.dtype)).square().sum()
        return total / _LIMITS.trace_probes


class Kernel(Operator):
    """G by its sample-space twin K = AAᵀ, held as a matrix, with products by A and Aᵀ."""

    def __init__(
        self,
        kernel: Tensor,
        project: Callable[[Tensor], Tensor],
        lift: Callable[[Tensor], Tensor],
        size: int,
    ) -> None:
        super().__init__(project, lift, (len(kernel), size), kernel.dtype, kernel.device)
        self._kernel = kernel
        self.structure = Structure("kernel", factored=True, low_rank=self.count < self.size)

    def kernel(self) -> Tensor:
        return self._kernel

    def row_norms(self) -> Tensor:
        return self._kernel.diagonal().clamp(min=0).sqrt()

    def trace(self) -> Tensor:
        return self._kernel.diagonal().sum()
