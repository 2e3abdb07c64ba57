r"""Orthonormal bases that grow by one tangent vector at a time.

With I the selected coordinates and G_λ = G + λ, both bases hold the triangular R with
RᵀR = G_λ[I, I] and y = R⁻ᵀg_I, so that h = R⁻¹y solves the system on I and gᵀh = ‖y‖². A new
vector adds one row to each: nothing is factorized again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..grams import FactoredGram, Gram


@dataclass(eq=False)
class SelectedTangents(ABC):
    """The selected tangent vectors, and the remainder ρ of the gradient.

    Attributes:
        diagonal: G_ii as given, and G_ii + λ from then on, (p,).
        k: the number of vectors there is room for.
        rcond: a new vector's component beside the selected ones, relative to its length, at least.
        follow: whether to update the Schur complements.
        white: r with Aᵀr = g, where it is known and used.
        rho: ρ = g − G_λ h, (p,), at the coordinates that are not selected.
        schur: G_ii + λ − G_iI G_λ[I, I]⁻¹ G_Ii, (p,), where it is followed.
        open: the coordinates that may still be selected.
    """

    gram: Gram
    diagonal: Tensor
    g: Tensor
    damping: float
    k: int
    rcond: float
    follow: bool
    white: Tensor | None = None

    def __post_init__(self) -> None:
        self.diagonal = self.diagonal + self.damping
        self.open = self.diagonal > 0
        self.selected: list[int] = []
        self.y: Tensor = self.g.new_zeros(self.k)
        self.rho: Tensor = self.g.clone()
        self.schur: Tensor | None = None
        if self.follow:
            self.schur = self.diagonal.clone()
        # max G_ii/pivot: round-off in g and G is amplified by its root and by itself
        self.growth = self.g.new_ones(())
        self._white_norm = None
        if self.white is not None:
            self._white_norm = self.white.norm()

    @property
    def count(self) -> int:
        """The number of selected tangent vectors."""
        return len(self.selected)

    @property
    def scale(self) -> Tensor:
        """√(gᵀh), or ‖r‖ where it is known: round-off in ρ_i/√G_ii is ε times this."""
        if self._white_norm is None:
            return self.y.norm()
        return self._white_norm

    def scores(self) -> Tensor:
        """Return |ρ_i|/√(Schur complement), or |ρ_i|/√G_ii where the complements are not updated.

        It is 0 where ρ_i is round-off, −1 where i is closed, and NaN where ρ_i is.
        """
        eps = torch.finfo(self.rho.dtype).eps
        p = len(self.rho)
        noise = 4 * (p + self.gram.count) ** 0.5 * eps * self.growth.sqrt()
        size = self.rho.abs()
        divisor = self.diagonal
        size = torch.where(size <= noise * self.scale * divisor.sqrt(), 0.0, size)
        if self.schur is not None:  # known to round-off, which is its lower bound
            divisor = self.schur.maximum(p * eps * divisor)
        return torch.where(self.open, size / divisor.sqrt(), -1.0)

    @abstractmethod
    def add(self, i: int) -> bool:
        """Close i; select it and return True unless its vector depends on those selected."""

    @abstractmethod
    def refresh(self, since: int) -> None:
        """Update ρ and the Schur complements by the vectors selected after the first `since`."""

    @abstractmethod
    def triangle(self) -> Tensor:
        """Return R, upper triangular."""

    def solution(self) -> Tensor:
        """Return h, (p,)."""
        h = torch.zeros_like(self.rho)
        if self.count:
            y = self.y[: self.count, None]
            x = torch.linalg.solve_triangular(self.triangle(), y, upper=True)[:, 0]
            h[self.selected] = x
        return h


class Columns(SelectedTangents):
    r"""From A: Gram–Schmidt on the columns [a_i; √λ e_i], each done twice.

    One product with A (the column; free where A is held) and one with Aᵀ per vector, in k·n
    numbers of memory. The orthonormal q_j see the condition of A, not of G; and y_j = q_jᵀr is
    used where r is known, since ρ_i/R_jj loses the digits by which R_jj is smaller than ‖a_i‖.
    The damping's share of q_j lives on selected coordinates only, in order of selection.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.gram, FactoredGram)
        self.factored = self.gram
        n = self.gram.count
        g = self.g
        k = self.k
        width = n + (k if self.damping > 0 else 0)
        self.q = g.new_zeros(k, width)
        self.r = g.new_zeros(k, k)
        # ρ = offset + Aᵀ·remainder: (0, r) where r is known, else (g, 0)
        self.offset = g
        self.remainder = g.new_zeros(width)
        if self.white is not None:
            self.offset = torch.zeros_like(g)
            self.remainder[:n] = self.white

    def add(self, i: int) -> bool:
        j = self.count
        n = self.factored.count
        self.open[i] = False
        a = torch.zeros_like(self.remainder)
        a[:n] = self._column(i)
        if self.damping > 0:
            a[n + j] = self.damping**0.5
        before = self.q[:j]
        along = before @ a
        v = a - along @ before
        correction = before @ v  # what round-off left of the selected directions
        v -= correction @ before
        pivot = v.norm()
        if not bool(pivot > self.rcond * self.diagonal[i].sqrt()):
            return False
        self.r[:j, j] = along + correction
        self.r[j, j] = pivot
        self.q[j] = v / pivot
        if self.white is not None:
            y = self.q[j] @ self.remainder
        else:
            y = (self.offset[i] + a @ self.remainder) / pivot
            self.growth = self.growth.maximum(self.diagonal[i] / pivot.square())
        self.y[j] = y
        self.remainder -= y * self.q[j]
        self.selected.append(i)
        return True

    def _column(self, i: int) -> Tensor:
        if self.factored.structure.holds == "rows":
            return self.factored.rows()[:, i]
        unit = torch.zeros_like(self.rho)
        unit[i] = 1
        return self.factored.project(unit)

    def refresh(self, since: int) -> None:
        n = self.factored.count
        new = slice(since, self.count)
        if self.schur is None:  # one product, however many vectors were added
            self.rho = self.offset + self.factored.lift(self.remainder[:n])
            return
        images = self.factored.lift_rows(self.q[new, :n])
        self.schur -= images.square().sum(0)
        self.rho -= self.y[new] @ images

    def triangle(self) -> Tensor:
        return self.r[: self.count, : self.count]


class Pivots(SelectedTangents):
    r"""From G alone: pivoted Cholesky, with the panel V = R⁻ᵀG_λ[I, :] of k·p numbers.

    V gives ρ ← ρ − y_j V_j and the Schur complements s ← s − V_j² for nothing. The condition
    is that of G.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schur is None:
            self.complement = self.diagonal.clone()
        else:
            self.complement = self.schur
        self.panel = self.g.new_zeros(self.k, self.gram.size)

    def add(self, i: int) -> bool:
        j = self.count
        self.open[i] = False
        before = self.panel[:j]
        line = self._column(i) - before[:, i] @ before
        pivot = line[i] + self.damping
        if not bool(pivot > self._smallest_pivot() * self.diagonal[i]):
            return False
        self.growth = self.growth.maximum(self.diagonal[i] / pivot)
        row = line / pivot.sqrt()
        row[i] = pivot.sqrt()
        self.panel[j] = row
        self.y[j] = self.rho[i] / pivot.sqrt()
        self.rho -= self.y[j] * row
        self.complement -= row.square()
        self.selected.append(i)
        return True

    def _column(self, i: int) -> Tensor:
        if self.gram.structure.holds == "dense":
            return self.gram.dense()[i]
        unit = torch.zeros_like(self.rho)
        unit[i] = 1
        return self.gram.matvec(unit)

    def refresh(self, since: int) -> None:
        self.open &= ~(self.complement <= self._smallest_pivot() * self.diagonal)

    def _smallest_pivot(self) -> Tensor:
        """Return the smallest fraction of G_ii that a pivot may have."""
        noise = self.gram.size * torch.finfo(self.rho.dtype).eps * self.growth
        return noise.clamp(min=self.rcond**2)

    def triangle(self) -> Tensor:
        return self.panel[: self.count, self.selected].triu()
