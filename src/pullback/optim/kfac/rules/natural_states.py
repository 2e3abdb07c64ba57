"""The states of the natural rule: inverses of both factors, and their products with gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import REFRESHED, SYMMETRIC, RuleState
from .half_inverse import (
    HalfInverse,
    apply_in_half,
    apply_in_half_with_bias,
    round_to_half,
    widen,
)

#: rows of matrices are multiples of this many entries, as tensor cores read them
_ALIGNED = 8


@dataclass
class InverseState(RuleState):
    """R⁻¹ (B, O, O) and C⁻¹ (B, m, m), or diagonals; m is n filled up to a multiple of 8.

    In float16 they are those of a `HalfInverse`, with its `rows` and `unit`; otherwise these
    are ones.
    """

    is_rebuilt: ClassVar = True

    left: Tensor = field(metadata=SYMMETRIC)
    right: Tensor = field(metadata=SYMMETRIC)
    rows: Tensor = field(metadata=REFRESHED)
    unit: Tensor = field(metadata=REFRESHED)

    @property
    def in_half(self) -> HalfInverse | None:
        """The inverses in float16, if they are held so."""
        if self.left.dtype != torch.float16:
            return None
        return HalfInverse(self.left, self.right, self.rows, self.unit)

    def store(self, left: Tensor, right: Tensor, *, is_half: bool) -> None:
        """Replace the inverse factors by these, in float16 if `is_half`."""
        if is_half:
            half = round_to_half(left, right)
            self.left = half.left
            self.right = half.right
            self.rows = half.rows
            self.unit = half.unit
        else:
            self.left = left
            self.right = right
            self.rows = left.new_ones(left.shape[:2])
            self.unit = left.new_ones(len(left))

    def apply(self, gradient: Tensor) -> Tensor:
        """Return R⁻¹ G C⁻¹ for G of shape (B, O, n)."""
        if self.in_half is not None:
            return apply_in_half(self.in_half, gradient)
        return _apply(self.left, gradient, self.right)

    def apply_with_bias(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return R⁻¹ [V b] C⁻¹ as its two parts, for V (B, O, I) and b (B, O)."""
        if self.in_half is not None:
            return apply_in_half_with_bias(self.in_half, weight, bias)
        return _apply_with_bias(self.left, weight, bias, self.right)

    def rescale(self, rows: Tensor, columns: Tensor) -> None:
        """Set R⁻¹ ← L R⁻¹L and C⁻¹ ← D C⁻¹D in their own memory, of which stacks hold views."""
        if self.in_half is None:
            scale_rows_and_columns(self.left, rows)
            scale_rows_and_columns(self.right, columns)
            return
        left, right = widen(self.in_half)
        scale_rows_and_columns(left, rows)
        scale_rows_and_columns(right, columns)
        for name, tensor in vars(round_to_half(left, right)).items():
            getattr(self, name).copy_(tensor)


@dataclass
class EigenState(RuleState):
    """The inverse (U ⊗ W) diag(scale) (U ⊗ W)ᵀ; a basis that is None is the identity.

    `spectrum` is a running mean of the gradient's squares in these bases and `mass` the weight of
    the statistics in it, where eigenvalues are corrected.
    """

    left: Tensor | None = field(metadata=REFRESHED)
    right: Tensor | None = field(metadata=REFRESHED)
    scale: Tensor = field(metadata=REFRESHED)
    spectrum: Tensor | None = field(metadata=REFRESHED)
    mass: Tensor | None = None

    def rescale(self, rows: Tensor, columns: Tensor) -> None:
        """Rescale bases, and eigenvalues along sides that are diagonal and have no basis."""
        if self.left is not None:
            self.left.mul_(rows[..., None])
        else:
            self.scale.mul_(rows.square()[..., None])
            if self.spectrum is not None:
                self.spectrum.div_(rows.square()[..., None])
        if self.right is not None:
            self.right.mul_(columns[..., None])
        else:
            self.scale.mul_(columns.square()[:, None])
            if self.spectrum is not None:
                self.spectrum.div_(columns.square()[:, None])


@dataclass
class UnitState(RuleState):
    """The inverse of each unit's matrix, (U, k, k)."""

    inverse: Tensor = field(metadata=REFRESHED)

    def rescale(self, rows: Tensor, columns: Tensor) -> None:
        """Rescale by the scales of the units' entries, (U, k), which come as rows."""
        scale_rows_and_columns(self.inverse, rows)


def scale_rows_and_columns(side: Tensor, by: Tensor) -> None:
    """Set s_ij ← f_i s_ij f_j in place, or s_i ← f_i² s_i for a diagonal; padding stays zero."""
    n = min(by.shape[-1], side.shape[-1])
    by = by[..., :n]
    if side.ndim == by.ndim:
        side[..., :n].mul_(by.square())
    else:
        side[..., :n, :n].mul_(by[..., None]).mul_(by[..., None, :])


def round_up_to_aligned(n: int) -> int:
    """Return the next multiple of 8 from n on."""
    return -(-n // _ALIGNED) * _ALIGNED


def pad_to_aligned(side: Tensor) -> Tensor:
    """Return a factor filled up with zeros to a multiple of 8 rows and columns."""
    more = round_up_to_aligned(side.shape[-1]) - side.shape[-1]
    if more:
        return F.pad(side, (0, more) * (side.ndim - 1))
    return side


def _apply(left: Tensor, v: Tensor, right: Tensor) -> Tensor:
    """Return R⁻¹ V C⁻¹ for V of shape (B, O, n)."""
    columns = v.shape[-1]
    v = _apply_left(left, v)
    if right.ndim == 2:
        return v * right[:, None, :columns]
    return torch.bmm(v, right[:, :columns, :columns])


def _apply_with_bias(
    left: Tensor, weight: Tensor, bias: Tensor, right: Tensor
) -> tuple[Tensor, Tensor]:
    """Return R⁻¹ [V b] C⁻¹ as its two parts, for V (B, O, I) and b (B, O).

    No matrix with an odd number of columns is multiplied: tensor cores read rows that begin at
    multiples of 8 entries, to which C⁻¹ is filled up.
    """
    columns = weight.shape[-1]
    joined = weight.new_empty(*weight.shape[:2], right.shape[-1])
    _apply_left(left, weight, out=joined[..., :columns])
    _apply_left(left, bias[..., None], out=joined[..., columns : columns + 1])
    joined[..., columns + 1 :] = 0
    last = right[..., columns : columns + 1]
    return torch.bmm(joined, right[..., :columns]), torch.bmm(joined, last)[..., 0]


def _apply_left(left: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
    """Return R⁻¹ V."""
    if left.ndim == 2:
        return torch.mul(left[..., None], v, out=out)
    return torch.bmm(left, v, out=out)
