r"""Inverse factors in float16, for products on tensor cores.

float16 has as many bits as TF32 and half its memory; it lacks range alone. So R⁻¹ = u D R̂ D with
D = diag(√(r⁻¹_ii / max r⁻¹)) is held as R̂, whose diagonal is 1 and whose other entries are at most
1, and C⁻¹ = c Ĉ with a number c. For a gradient G of which m is the largest entry of DG,

    R⁻¹ G C⁻¹ = m·u·c · D (R̂ (DG/m)) Ĉ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....grams.kronecker import factor_matrix


@dataclass(frozen=True)
class HalfRange:
    """Ranges of what is held in float16, whose largest number is 65,504."""

    #: the largest entry of DG/m: entries of its product with R̂ are below O times as much, for
    #: O ≤ 8,192 rows
    gradient_entry: float = 4.0
    #: the largest entry of Ĉ: products with it are summed up in float32
    input_entry: float = 2.0**14
    #: entries of D at least: below is round-off
    least_scale: float = 2.0**-20
    #: the largest entry of zeros, which are divided by
    least_entry: float = 2.0**-80


@dataclass(frozen=True)
class HalfSizes:
    """Sizes from which on float16 pays on an H200."""

    #: rows of the smaller factor
    smaller: int = 512
    #: rows of both factors together
    total: int = 2560
    #: rows of the output factor are a multiple of this number, as tensor cores read them
    multiple: int = 8
    #: rows of the output factor at most: see `HalfRange.gradient_entry`
    most_rows: int = 8192


_RANGE = HalfRange()
_SIZES = HalfSizes()


@dataclass(frozen=True)
class HalfInverse:
    """R̂ (B, O, O) and Ĉ (B, n, n) in float16, D (B, O), and u·c, (B,)."""

    left: Tensor
    right: Tensor
    rows: Tensor
    unit: Tensor


def pays_in_half(left: Tensor, right: Tensor) -> bool:
    """Return True if float16 is faster: factors are large, on a GPU, and TF32 is allowed."""
    if not left.is_cuda or left.dtype != torch.float32:
        return False
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return False
    if factor_matrix.is_diagonal(left) or factor_matrix.is_diagonal(right):
        return False
    rows = left.shape[-1]
    columns = right.shape[-1]
    has_sizes = min(rows, columns) >= _SIZES.smaller and rows + columns >= _SIZES.total
    return has_sizes and rows % _SIZES.multiple == 0 and rows <= _SIZES.most_rows


def round_to_half(left: Tensor, right: Tensor) -> HalfInverse:
    """Return inverse factors R⁻¹ and C⁻¹ in float16."""
    diagonal = factor_matrix.diagonal(left)
    left_unit = diagonal.amax(1).clamp(min=_RANGE.least_entry)
    rows = (diagonal / left_unit[:, None]).clamp(min=_RANGE.least_scale**2).sqrt()
    scaled_left = left / left_unit[:, None, None]
    scaled_left.div_(rows[..., None]).div_(rows[:, None])
    right_unit = factor_matrix.diagonal(right).amax(1).clamp(min=_RANGE.least_entry)
    right_unit = right_unit / _RANGE.input_entry
    scaled_right = right / right_unit[:, None, None]
    return HalfInverse(scaled_left.half(), scaled_right.half(), rows, left_unit * right_unit)


def widen(inverse: HalfInverse) -> tuple[Tensor, Tensor]:
    """Return matrices in float32 whose Kronecker product is that of R⁻¹ and C⁻¹."""
    rows = inverse.rows
    left = inverse.left.float() * (inverse.unit[:, None] * rows)[..., None] * rows[:, None]
    return left, inverse.right.float()


@dataclass(frozen=True)
class _HalfProduct:
    """R̂ (DG/m) Ĉ in float32, (B, O, n), and what its rows are to be multiplied by, (B, O)."""

    product: Tensor
    scale: Tensor


def apply_in_half(inverse: HalfInverse, gradient: Tensor) -> Tensor:
    """Return R⁻¹ G C⁻¹ in float32 for G (B, O, k), where Ĉ may be filled up with zeros from k."""
    result = _multiply_both(inverse, gradient, None)
    return result.product[..., : gradient.shape[2]] * result.scale[..., None]


def apply_in_half_with_bias(
    inverse: HalfInverse, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return R⁻¹ [V b] C⁻¹ as its two parts, for V (B, O, I) and b (B, O)."""
    result = _multiply_both(inverse, weight, bias)
    columns = weight.shape[2]
    weight_part = result.product[..., :columns] * result.scale[..., None]
    return weight_part, result.product[..., columns] * result.scale


def _multiply_both(inverse: HalfInverse, weight: Tensor, bias: Tensor | None) -> _HalfProduct:
    """Return R̂ (DG/m) Ĉ for G = [V b], or for G = V without a bias."""
    columns = weight.shape[2]
    rows = inverse.rows
    peaks = torch.linalg.vector_norm(weight, torch.inf, dim=2)
    if bias is not None:
        peaks = torch.maximum(peaks, bias.abs())
    largest = (peaks * rows).amax(1, keepdim=True).clamp(min=_RANGE.least_entry)
    largest = largest / _RANGE.gradient_entry
    scale = rows / largest
    half = weight.new_empty(*weight.shape[:2], inverse.right.shape[1], dtype=torch.float16)
    torch.mul(weight, scale[..., None], out=half[..., :columns])
    if bias is not None:
        torch.mul(bias, scale, out=half[..., columns])
        columns += 1
    half[..., columns:] = 0
    product = _multiply(_multiply(inverse.left, half).half(), inverse.right, torch.float32)
    return _HalfProduct(product, rows * (largest * inverse.unit[:, None]))


def _multiply(x: Tensor, y: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """Return XY of float16 matrices, summed in float32, in `dtype`; on a CPU in float32."""
    if not x.is_cuda:
        return x.float() @ y.float()
    if dtype == torch.float16:
        return torch.bmm(x, y)
    return torch.bmm(x, y, out_dtype=dtype)
