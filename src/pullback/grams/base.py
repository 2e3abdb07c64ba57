r"""Grams G = Jᵀ M J = AᵀA: the pullback metric on parameters, and the forms it is held in.

Vectors on the parameter side have shape (p,), on the row side (n,), where A = SᵀJ is n × p.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PANEL = 2**23  # entries of A that are compressed at once


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

    def rows(self) -> Tensor:
        """A as a matrix (n, p)."""
        eye = torch.eye(self.count, dtype=self.dtype, device=self.device)
        return torch.stack([self.lift(e) for e in eye])

    def compressed(self, columns: Callable[[Tensor], Tensor]) -> Tensor:
        """A Ω, (n, k), for Ω as a function of rows: (..., p) -> (..., k)."""
        rows = self.rows()
        return torch.cat([columns(x) for x in rows.split(max(1, _PANEL // self.size))])

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
