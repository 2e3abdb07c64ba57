"""The tangent of β = W₁⋯W_L, dβ = Σ_i A_i dW_i B_i with A_i = W₁⋯W_{i−1}, B_i = W_{i+1}⋯W_L.

Its singular value decomposition A = U Σ Vᵀ has the face of `_core.svd.Svd`: `sigma`, products
with Uᵀ (`left`), Vᵀ (`right`) and V (`combine`, along the last axis), and `select`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log2, prod

import torch
from torch import Tensor

from .._core.svd import Svd


@dataclass(frozen=True)
class Isometric:
    """A = C E for a small C = U Σ Wᵀ and an E with E Eᵀ = 1: then V = EᵀW.

    `reduce` is E, (p,) -> (q,), and `expand` is Eᵀ along the last axis.
    """

    core: Svd
    reduce: Callable[[Tensor], Tensor]
    expand: Callable[[Tensor], Tensor]

    @property
    def sigma(self) -> Tensor:
        """The singular values of C."""
        return self.core.sigma

    def left(self, r: Tensor) -> Tensor:
        return self.core.left(r)

    def right(self, g: Tensor) -> Tensor:
        return self.core.right(self.reduce(g))

    def combine(self, c: Tensor) -> Tensor:
        return self.expand(self.core.combine(c))

    def select(self, keep: Tensor) -> Isometric:
        return replace(self, core=self.core.select(keep))


def products_around(factors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """All A_i, (d₀, d_{i−1}), and B_i, (d_i, d_L); A₁ and B_L are identities."""
    first = factors[0]
    last = factors[-1]
    before = [torch.eye(first.shape[-2], dtype=first.dtype, device=first.device)]
    for w in factors[:-1]:
        before.append(before[-1] @ w)
    after = [torch.eye(last.shape[-1], dtype=last.dtype, device=last.device)]
    for w in reversed(factors[1:]):
        after.append(w @ after[-1])
    return before, after[::-1]


def level_factors(factors: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Factors times a power of two s at which J has size 1, and s^(L−1), by which it changed J.

    Squares of J are then representable, whatever the factors' sizes.
    """
    sizes = sorted(float(w.abs().max()) for w in factors)[1:]  # J leaves one factor out
    if not sizes or sizes[0] == 0:
        return list(factors), 1.0
    power = -max(-1000, min(1000, round(sum(map(log2, sizes)) / len(sizes))))
    total_power = power * len(sizes)
    change = 2.0**total_power if total_power < 1024 else inf
    return [w * 2.0**power for w in factors], change


def kron(a: Tensor, b: Tensor) -> Tensor:
    """a ⊗ b for any strides, at which `torch.kron` may fail."""
    return (a[:, None, :, None] * b[None, :, None, :]).flatten(2).flatten(0, 1)


@dataclass(frozen=True)
class FactorTerm:
    """One factor's share L dW R of the tangent.

    Attributes:
        left: L.
        right: R.
        row_basis: an orthonormal basis Q (d_in, a) outside of which L vanishes; None stands for the
            identity.
        column_basis: the same for R, K (d_out, b): only the coordinates QᵀdW K of a move count.
    """

    left: Tensor
    right: Tensor
    row_basis: Tensor | None = None
    column_basis: Tensor | None = None

    @classmethod
    def of(cls, left: Tensor, right: Tensor) -> FactorTerm:
        """With bases of the row space of L and the column space of R, where they are smaller."""
        row_basis = None
        if left.shape[0] < left.shape[1]:
            row_basis = torch.linalg.qr(left.T).Q
        column_basis = None
        if right.shape[1] < right.shape[0]:
            column_basis = torch.linalg.qr(right).Q
        return cls(left, right, row_basis, column_basis)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of dW."""
        return self.left.shape[1], self.right.shape[0]

    @property
    def reduced_shape(self) -> tuple[int, int]:
        """The shape of QᵀdW K."""
        rows, columns = self.shape
        if self.row_basis is not None:
            rows = self.row_basis.shape[1]
        if self.column_basis is not None:
            columns = self.column_basis.shape[1]
        return rows, columns

    @cached_property
    def reduced_left(self) -> Tensor:
        """L Q."""
        if self.row_basis is None:
            return self.left
        return self.left @ self.row_basis

    @cached_property
    def reduced_right(self) -> Tensor:
        """KᵀR."""
        if self.column_basis is None:
            return self.right
        return self.column_basis.T @ self.right

    def reduce(self, move: Tensor) -> Tensor:
        """QᵀdW K."""
        if self.row_basis is not None:
            move = self.row_basis.T @ move
        if self.column_basis is not None:
            move = move @ self.column_basis
        return move

    def expand(self, coordinates: Tensor) -> Tensor:
        """Q Y Kᵀ for coordinates Y, over leading axes."""
        if self.row_basis is not None:
            coordinates = self.row_basis @ coordinates
        if self.column_basis is not None:
            coordinates = coordinates @ self.column_basis.T
        return coordinates


class FactorTangent(ABC):
    """J of some function values with respect to the factors, never formed."""

    def __init__(self, terms: Sequence[FactorTerm]) -> None:
        self.terms = tuple(terms)
        self._sizes = [prod(term.shape) for term in terms]
        self._reduced_sizes = [prod(term.reduced_shape) for term in terms]
        #: p, the number of parameters
        self.size = sum(self._sizes)
        #: q, the number of coordinates that count
        self.width = sum(self._reduced_sizes)

    #: number of rows of J
    count: int

    @abstractmethod
    def push(self, moves: Sequence[Tensor]) -> Tensor:
        """J applied to one move per term: (n,)."""

    @abstractmethod
    def pull(self, u: Tensor) -> list[Tensor]:
        """Jᵀu, one tensor per term."""

    @abstractmethod
    def kernel(self) -> Tensor:
        """JJᵀ, (n, n)."""

    @abstractmethod
    def core(self) -> Tensor:
        """J in the coordinates QᵀdW K of all terms, (n, q)."""

    def pull_flat(self, u: Tensor) -> Tensor:
        """Jᵀu, (p,)."""
        return torch.cat([m.flatten() for m in self.pull(u)])

    def split(self, v: Tensor) -> list[Tensor]:
        """A flat (..., p) vector as one tensor per term."""
        moves = []
        for term, piece in zip(self.terms, v.split(self._sizes, -1), strict=True):
            moves.append(piece.reshape(*v.shape[:-1], *term.shape))
        return moves

    def reduce(self, v: Tensor) -> Tensor:
        """E v: (p,) -> (q,)."""
        moves = zip(self.terms, self.split(v), strict=True)
        return torch.cat([t.reduce(m).flatten() for t, m in moves])

    def expand(self, c: Tensor) -> Tensor:
        """Eᵀc: (..., q) -> (..., p)."""
        moves = []
        for term, piece in zip(self.terms, c.split(self._reduced_sizes, -1), strict=True):
            coordinates = piece.reshape(*c.shape[:-1], *term.reduced_shape)
            moves.append(term.expand(coordinates).flatten(-2))
        return torch.cat(moves, -1)


class MatrixTangent(FactorTangent):
    """Of a whole matrix z (N, m): dz = Σ L dW R."""

    def __init__(self, terms: Sequence[FactorTerm]) -> None:
        super().__init__(terms)
        self.shape = terms[0].left.shape[0], terms[0].right.shape[1]
        self.count = self.shape[0] * self.shape[1]

    def push(self, moves: Sequence[Tensor]) -> Tensor:
        pushed = [t.left @ m @ t.right for t, m in zip(self.terms, moves, strict=True)]
        return torch.stack(pushed).sum(0).flatten()

    def pull(self, u: Tensor) -> list[Tensor]:
        u = u.view(self.shape)
        return [t.left.T @ u @ t.right.T for t in self.terms]

    def kernel(self) -> Tensor:
        kernel = self.terms[0].left.new_zeros(self.count, self.count)
        for t in self.terms:
            kernel += kron(t.left @ t.left.T, t.right.T @ t.right)
        return kernel

    def core(self) -> Tensor:
        return torch.cat([kron(t.reduced_left, t.reduced_right.T) for t in self.terms], 1)


class EntryTangent(FactorTangent):
    """Of the entries β[rows, columns], (n,): rows of L and columns of R, one pair for each."""

    def __init__(self, terms: Sequence[FactorTerm], rows: Tensor, columns: Tensor) -> None:
        entry_terms = []
        for term in terms:
            left = term.left[rows]
            right = term.right[:, columns]
            entry_terms.append(FactorTerm(left, right, term.row_basis, term.column_basis))
        super().__init__(entry_terms)
        self.count = len(rows)

    def push(self, moves: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.terms, moves, strict=True)
        return torch.stack([((t.left @ m) * t.right.T).sum(1) for t, m in pairs]).sum(0)

    def pull(self, u: Tensor) -> list[Tensor]:
        return [t.left.T @ (u[:, None] * t.right.T) for t in self.terms]

    def kernel(self) -> Tensor:
        out = self.terms[0].left.new_zeros(self.count, self.count)
        for t in self.terms:
            out += (t.left @ t.left.T) * (t.right.T @ t.right)
        return out

    def core(self) -> Tensor:
        blocks = []
        for term in self.terms:
            products = term.reduced_left[:, :, None] * term.reduced_right.T[:, None, :]
            blocks.append(products.flatten(1))
        return torch.cat(blocks, 1)
