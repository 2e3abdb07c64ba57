r"""Singular value decompositions A = U Σ Vᵀ of tangents whose structure gives them away.

Each has the face of `_core.svd.Svd`: `sigma`, products with Uᵀ (`left`), Vᵀ (`right`) and V
(`combine`, along the last axis), and `select`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Line:
    """One term L dW R of dz, in bases shared with the others: L = U l Vᵀ and R = K r Hᵀ."""

    l: Tensor  # noqa: E741
    v: Tensor
    r: Tensor
    k: Tensor


@dataclass(frozen=True)
class Commuting:
    r"""dz = Σ_t L_t dW_t R_t with all L_t = U l_t V_tᵀ and R_t = K_t r_t Hᵀ for the same U and H.

    The left singular vectors are the matrices u_i h_jᵀ, with σ_ij² = Σ_t l_ti² r_tj²: the
    Sylvester equation P Λ + Λ Q = ∇ in the eigenbases of P and Q, with σ never squared.
    """

    u: Tensor
    h: Tensor
    lines: Sequence[Line]
    grid: Tensor
    keep: Tensor
    scale: float = 1.0

    @classmethod
    def of(cls, u: Tensor, h: Tensor, lines: Sequence[Line], scale: float = 1.0) -> Commuting:
        """With σ from the lines; `scale` multiplies A."""
        parts = torch.stack([torch.outer(t.l, t.r) for t in lines])
        grid = torch.linalg.vector_norm(parts, dim=0)
        return cls(u, h, lines, grid, torch.ones_like(grid, dtype=torch.bool), scale)

    @property
    def sigma(self) -> Tensor:
        """The singular values, in the order of the grid (i, j)."""
        return self.scale * self.grid[self.keep]

    def left(self, r: Tensor) -> Tensor:
        z = r.view(len(self.u), len(self.h))
        return (self.u.T @ z @ self.h)[self.keep]

    def right(self, g: Tensor) -> Tensor:
        total = torch.zeros_like(self.grid)
        for t, move in zip(self.lines, self._split(g), strict=True):
            total += self._share(t) * (t.v.T @ move @ t.k)
        return total[self.keep]

    def combine(self, c: Tensor) -> Tensor:
        full = c.new_zeros(*c.shape[:-1], *self.grid.shape)
        full[..., self.keep] = c
        moves = [t.v @ (self._share(t) * full) @ t.k.T for t in self.lines]
        return torch.cat([m.flatten(-2) for m in moves], -1)

    def select(self, keep: Tensor) -> Commuting:
        mask = self.keep.clone()
        mask[self.keep] = keep
        return replace(self, keep=mask)

    def _share(self, t: Line) -> Tensor:
        """l_i r_j/σ_ij: the cosine between a singular vector and this term's part of it."""
        return torch.where(self.grid > 0, torch.outer(t.l, t.r) / self.grid, 0.0)

    def _split(self, g: Tensor) -> list[Tensor]:
        sizes = [len(t.v) * len(t.k) for t in self.lines]
        return [m.view(len(t.v), len(t.k)) for m, t in zip(g.split(sizes), self.lines, strict=True)]


def commuting(lefts: Sequence[Tensor], rights: Sequence[Tensor], scale: float) -> Commuting:
    """The spectrum of L dW R, or of dW₁ R + L dW₂ (lefts = [1, L], rights = [R, 1])."""
    if len(lefts) == 1:
        u, l, vh = torch.linalg.svd(lefts[0], full_matrices=False)  # noqa: E741
        k, r, hh = torch.linalg.svd(rights[0], full_matrices=False)
        return Commuting.of(u, hh.mT, [Line(l, vh.mT, r, k)], scale)
    u, l, vh = torch.linalg.svd(lefts[1])  # noqa: E741
    k, r, hh = torch.linalg.svd(rights[0])
    l, v = _padded(l, vh.mT, len(u))  # noqa: E741
    r, k = _padded(r, k, len(hh))
    one, two = torch.ones_like(l), torch.ones_like(r)
    return Commuting.of(u, hh.mT, [Line(one, u, r, k), Line(l, v, two, hh.mT)], scale)


def _padded(sigma: Tensor, basis: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As many singular values and vectors as the other side has, with zeros for those missing."""
    basis = basis[:, :count]
    missing = count - len(sigma)
    if basis.shape[1] < count:
        basis = torch.cat([basis, basis.new_zeros(len(basis), count - basis.shape[1])], 1)
    return torch.cat([sigma, sigma.new_zeros(missing)]), basis
