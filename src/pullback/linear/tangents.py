"""The tangent of β = W₁⋯W_L, dβ = Σ_i A_i dW_i B_i with A_i = W₁⋯W_{i−1}, B_i = W_{i+1}⋯W_L.

Its singular value decomposition A = U Σ Vᵀ has the face of `_core.svd.Svd`: `sigma`, products
with Uᵀ (`left`), Vᵀ (`right`) and V (`combine`, along the last axis), and `select`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log2

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


def around(factors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """All A_i, (d₀, d_{i−1}), and B_i, (d_i, d_L); A₁ and B_L are identities."""
    first, last = factors[0], factors[-1]
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
    total = power * len(sizes)
    return [w * 2.0**power for w in factors], 2.0**total if total < 1024 else inf


def kron(a: Tensor, b: Tensor) -> Tensor:
    """a ⊗ b for any strides, at which `torch.kron` may fail."""
    return (a[:, None, :, None] * b[None, :, None, :]).flatten(2).flatten(0, 1)


@dataclass(frozen=True)
class FactorTerm:
    """One factor's share L dW R of the tangent.

    `narrow` and `wide` are orthonormal bases Q (d_in, a) and K (d_out, b) outside of which L and R
    vanish, so that only the coordinates QᵀdW K of a move count; None stands for the identity.
    """

    left: Tensor
    right: Tensor
    narrow: Tensor | None = None
    wide: Tensor | None = None

    @classmethod
    def of(cls, left: Tensor, right: Tensor) -> FactorTerm:
        """With bases of the row space of L and the column space of R, where they are smaller."""
        narrow = torch.linalg.qr(left.T).Q if left.shape[0] < left.shape[1] else None
        wide = torch.linalg.qr(right).Q if right.shape[1] < right.shape[0] else None
        return cls(left, right, narrow, wide)

    @property
    def shape(self) -> tuple[int, int]:
        """Of dW."""
        return self.left.shape[1], self.right.shape[0]

    @property
    def small(self) -> tuple[int, int]:
        """Of QᵀdW K."""
        rows, columns = self.shape
        return (
            rows if self.narrow is None else self.narrow.shape[1],
            columns if self.wide is None else self.wide.shape[1],
        )

    @cached_property
    def sides(self) -> tuple[Tensor, Tensor]:
        """L Q and KᵀR."""
        left = self.left if self.narrow is None else self.left @ self.narrow
        return left, self.right if self.wide is None else self.wide.T @ self.right

    def reduce(self, move: Tensor) -> Tensor:
        """QᵀdW K."""
        move = move if self.narrow is None else self.narrow.T @ move
        return move if self.wide is None else move @ self.wide

    def expand(self, small: Tensor) -> Tensor:
        """Q Y Kᵀ over leading axes."""
        small = small if self.narrow is None else self.narrow @ small
        return small if self.wide is None else small @ self.wide.T


class FactorTangent(ABC):
    """J of some function values with respect to the factors, never formed."""

    def __init__(self, terms: Sequence[FactorTerm]) -> None:
        self.terms = tuple(terms)
        self.size = sum(a * b for a, b in (t.shape for t in terms))
        self.width = sum(a * b for a, b in (t.small for t in terms))

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

    def pulled(self, u: Tensor) -> Tensor:
        """Jᵀu, (p,)."""
        return torch.cat([m.flatten() for m in self.pull(u)])

    def split(self, v: Tensor) -> list[Tensor]:
        """A flat (..., p) vector as one tensor per term."""
        pieces = v.split([a * b for a, b in (t.shape for t in self.terms)], -1)
        return [m.reshape(*v.shape[:-1], *t.shape) for m, t in zip(pieces, self.terms, strict=True)]

    def reduce(self, v: Tensor) -> Tensor:
        """E v: (p,) -> (q,)."""
        moves = zip(self.terms, self.split(v), strict=True)
        return torch.cat([t.reduce(m).flatten() for t, m in moves])

    def expand(self, c: Tensor) -> Tensor:
        """Eᵀc: (..., q) -> (..., p)."""
        pieces = c.split([a * b for a, b in (t.small for t in self.terms)], -1)
        shaped = [
            m.reshape(*c.shape[:-1], *t.small) for m, t in zip(pieces, self.terms, strict=True)
        ]
        moves = [t.expand(m) for t, m in zip(self.terms, shaped, strict=True)]
        return torch.cat([m.flatten(-2) for m in moves], -1)


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
        out = self.terms[0].left.new_zeros(self.count, self.count)
        for t in self.terms:
            out += kron(t.left @ t.left.T, t.right.T @ t.right)
        return out

    def core(self) -> Tensor:
        return torch.cat([kron(t.sides[0], t.sides[1].T) for t in self.terms], 1)


class EntryTangent(FactorTangent):
    """Of the entries β[rows, columns], (n,): rows of L and columns of R, one pair for each."""

    def __init__(self, terms: Sequence[FactorTerm], rows: Tensor, columns: Tensor) -> None:
        super().__init__(
            [FactorTerm(t.left[rows], t.right[:, columns], t.narrow, t.wide) for t in terms]
        )
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
        sides = [t.sides for t in self.terms]
        return torch.cat([(a[:, :, None] * b.T[:, None, :]).flatten(1) for a, b in sides], 1)
