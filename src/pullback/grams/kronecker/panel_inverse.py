r"""Inverses of many matrices of different sizes at once on a GPU, by products of their panels.

With S = LLᵀ and U = L⁻ᵀ the inverse is S⁻¹ = UUᵀ. For panel k and the rows i ≥ k,

    T_ik = S_ik − Σ_{j<k} L_ij L_kjᵀ,   L_kk L_kkᵀ = T_kk,   U_kk = L_kk⁻ᵀ,   L_ik = T_ik U_kk.

The blocks T_kk of all matrices are factorized together, so that the chain of small kernels is as
long as that of the largest matrix alone. Then neighbors on the diagonal of U are joined,

    [L₁₁ 0; L₂₁ L₂₂]⁻ᵀ = [U₁₁ −U₁₁L₂₁ᵀU₂₂; 0 U₂₂].

Everything happens in the memory of S: L lies below the diagonal, U on it and above. The host
does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.products import full_precision


@dataclass(frozen=True)
class PanelSizes:
    """How matrices are cut into panels."""

    #: columns that are factorized at a time: smaller panels make small products, larger ones leave
    #: more to the factorization, which is slower than products
    width: int = 256
    #: sizes are filled up to a multiple of this number, at which products are fast
    alignment: int = 32
    #: strips of rows of U in UUᵀ: eight leave out most of the products with zeros
    strips: int = 8
    #: rows from which on panels are faster than one factorization of the whole matrix
    least_rows: int = 96


SIZES = PanelSizes()


@dataclass(frozen=True)
class PanelInverse:
    """The inverses of a stack, and whether each can be trusted, (B,)."""

    matrices: Tensor
    is_trusted: Tensor


def allocate_padded(count: int, n: int, reference: Tensor, sizes: PanelSizes = SIZES) -> Tensor:
    """Return identities (count, m, m) with m ≥ n, for matrices to be written into their corners."""
    m = -(-n // sizes.alignment) * sizes.alignment
    matrices = reference.new_zeros(count, m, m)
    matrices.diagonal(dim1=-2, dim2=-1).fill_(1)
    return matrices


def invert_by_panels(stacks: Sequence[Tensor], sizes: PanelSizes = SIZES) -> list[PanelInverse]:
    """Replace symmetric matrices (B, m, m) of one dtype and device by their inverses.

    An inverse is trusted where all pivots are above m·ε of their entry of the diagonal.
    """
    if not stacks:
        return []
    factorizations = [_PanelFactorization(matrices, sizes) for matrices in stacks]
    largest = max(each.size for each in factorizations)
    with full_precision(stacks[0].device, 0):
        for start in range(0, largest, sizes.width):
            _factorize_panels([f for f in factorizations if start < f.size], start, sizes.width)
        return [each.finish() for each in factorizations]


def _factorize_panels(
    factorizations: Sequence[_PanelFactorization], start: int, width: int
) -> None:
    """Factorize the panels that begin at column `start`, of all matrices that have one."""
    columns = [each.reduced_column(start) for each in factorizations]
    eye = torch.eye(width, dtype=columns[0].dtype, device=columns[0].device)
    corners = torch.cat([_fill_with_identity(column, eye) for column in columns])
    lower, errors = torch.linalg.cholesky_ex(corners)
    upper = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    counts = [len(column) for column in columns]
    parts = zip(factorizations, columns, upper.split(counts), errors.split(counts), strict=True)
    for factorization, column, block, error in parts:
        factorization.store_column(start, column, block, error)


def _fill_with_identity(column: Tensor, eye: Tensor) -> Tensor:
    """Return the square at the top of a column (B, rows, n), filled up to the size of `eye`."""
    n = column.shape[2]
    if n == len(eye):
        return column[:, :n]
    filled = eye.repeat(len(column), 1, 1)
    filled[:, :n, :n] = column[:, :n]
    return filled


class _PanelFactorization:
    """Matrices (B, m, m) that become L and U, and then their inverses."""

    def __init__(self, matrices: Tensor, sizes: PanelSizes) -> None:
        self.size = matrices.shape[-1]
        self._matrices = matrices
        self._sizes = sizes
        self._entries = matrices.diagonal(dim1=-2, dim2=-1).clone()
        self._errors = torch.zeros(len(matrices), dtype=torch.int32, device=matrices.device)

    def reduced_column(self, start: int) -> Tensor:
        """Return T_ik of the panel that begins at `start`, for the rows from there on."""
        stop = min(start + self._sizes.width, self.size)
        rows = self._matrices[:, start:]
        column = rows[..., start:stop]
        if not start:
            return column.clone()
        known = rows[..., :start]
        return torch.baddbmm(column, known, known[:, : stop - start].mT, alpha=-1)

    def store_column(self, start: int, column: Tensor, upper: Tensor, errors: Tensor) -> None:
        """Write U_kk, which may be filled up, and L_ik = T_ik U_kk below it."""
        width = column.shape[2]
        stop = start + width
        upper = upper[:, :width, :width]
        self._errors = torch.maximum(self._errors, errors)
        self._matrices[:, start:stop, start:stop] = upper
        if stop < self.size:
            below = self._matrices[:, stop:, start:stop]
            torch.bmm(column[:, width:], upper, out=below)

    def finish(self) -> PanelInverse:
        """Return UUᵀ, once all columns are stored."""
        is_trusted = self._has_good_pivots() & (self._errors == 0)
        self._invert_triangle(0, self.size)
        self._square()
        return PanelInverse(self._matrices, is_trusted)

    def _has_good_pivots(self) -> Tensor:
        """Return which matrices have pivots 1/U_jj above round-off."""
        floor = self.size * torch.finfo(self._matrices.dtype).eps
        diagonal = self._matrices.diagonal(dim1=-2, dim2=-1)
        return (diagonal.square() * (floor * self._entries) < 1).all(-1)

    def _invert_triangle(self, start: int, stop: int) -> None:
        """Make U between these rows from its panels' blocks; zeros take the place of L."""
        panels = -(-(stop - start) // self._sizes.width)
        if panels == 1:
            return
        middle = start + (panels + 1) // 2 * self._sizes.width
        self._invert_triangle(start, middle)
        self._invert_triangle(middle, stop)
        first = self._matrices[:, start:middle, start:middle]
        second = self._matrices[:, middle:stop, middle:stop]
        below = self._matrices[:, middle:stop, start:middle]
        above = self._matrices[:, start:middle, middle:stop]
        torch.baddbmm(above, first, below.mT @ second, beta=0, alpha=-1, out=above)
        below.zero_()

    def _square(self) -> None:
        """Set S⁻¹ = UUᵀ strip by strip: what later strips read of U lies below and to the right."""
        width = max(self._sizes.width, -(-self.size // self._sizes.strips))
        for start in range(0, self.size, width):
            stop = min(start + width, self.size)
            strip = self._matrices[:, start:stop, start:]
            product = torch.bmm(self._matrices[:, :stop, start:], strip.mT)
            self._matrices[:, start:stop, :stop] = product.mT
        for start in range(width, self.size, width):
            stop = min(start + width, self.size)
            lower = self._matrices[:, start:stop, :start]
            self._matrices[:, :start, start:stop] = lower.mT
