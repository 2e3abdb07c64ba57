r"""Inverse Kronecker blocks, and how gradients are multiplied by them: R⁻¹ G C⁻¹.

With weight V, bias b and the inverse right side [P q; qᵀ s] of a joint block,

    U = R⁻¹V,  u = R⁻¹b:        weight  [U u] [P; qᵀ],        bias  [U u] [q; s],

so that no odd matrix with the bias as one more column is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import factor_matrix
from .blocks import from_bases, to_bases

#: what rules keep of the gradients
MOMENTS = ("first", "second", "steps")


@dataclass
class Inverse:
    """The inverses of B blocks of one shape, or of one block.

    Kronecker blocks have `left` (B, O, O) and `right` (B, n, n), or diagonals (B, n), where n
    counts the bias and is filled up with zeros to `aligned(n)`. With `scale` (B, O, n) the sides
    are eigenvectors (None for the identity), not filled up, and `scale` holds reciprocal
    eigenvalues. With `rows` (B, O) and `unit` (B,) the sides are in float16, see `rounded`. With
    `factors` they are lower Cholesky factors, not filled up, to solve with. Units have `left`
    alone, (U, k, k).

    Rules that keep moments of the gradient have them here: `first` and `second`, (B, O, n), and the
    number of `steps` in them, (B,). Their sides are roots or eigenbases, not filled up, in float16
    on a GPU.
    """

    left: Tensor | None
    right: Tensor | None = None
    scale: Tensor | None = None
    rows: Tensor | None = None
    unit: Tensor | None = None
    first: Tensor | None = None
    second: Tensor | None = None
    steps: Tensor | None = None
    factors: bool = False

    def tensors(self) -> dict[str, Tensor]:
        """All that is held, by name."""
        return {n: t for n, t in vars(self).items() if isinstance(t, Tensor)}

    @property
    def kind(self) -> tuple[object, ...]:
        """Blocks of the same kind are stacked and applied together."""
        held = self.tensors().items()
        return self.factors, *((n, t.shape[1:], t.dtype, t.device) for n, t in held)

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients that it is applied to."""
        held = self.tensors()
        return held.get("unit", held.get("first", next(iter(held.values())))).dtype


def aligned(n: int) -> int:
    """n filled up to a multiple of 8: tensor cores read no other rows."""
    return -(-n // 8) * 8


def apply_inverse(inverse: Inverse, given: Sequence[Tensor]) -> list[Tensor]:
    """Multiply stacked gradients by the inverses of B blocks of one shape.

    Args:
        inverse: of B blocks.
        given: weights (B, O, I) and perhaps biases (B, O); for units one tensor (k, U).
    """
    left, right, scale = inverse.left, inverse.right, inverse.scale
    if scale is not None:  # U (scale ∘ UᵀVW) Wᵀ
        v = to_bases(left, _joined(given), right) * scale
        return _parted(from_bases(left, v, right), given)
    assert left is not None
    if right is None:  # Σ_j m_ij g_j for gains and shifts (k, U) of all units
        x = given[0]
        return [left[:, 0].T * x if len(x) == 1 else (left.permute(1, 2, 0) * x).sum(1)]
    if inverse.factors:
        return _solved(left, right, given)
    if inverse.rows is not None:
        return _by_rounded(inverse, *given)
    if len(given) == 1:
        return [_by_right(_by_left(left, given[0]), right)]
    return _with_bias(left, right, *given)


def _by_left(left: Tensor, v: Tensor, out: Tensor | None = None) -> Tensor:
    if factor_matrix.is_diagonal(left):
        return torch.mul(left[..., None], v, out=out)
    return torch.bmm(left, v, out=out)


def _by_right(v: Tensor, right: Tensor) -> Tensor:
    n = v.shape[-1]
    return (
        v * right[:, None, :n]
        if factor_matrix.is_diagonal(right)
        else torch.bmm(v, right[:, :n, :n])
    )


def _with_bias(left: Tensor, right: Tensor, v: Tensor, b: Tensor) -> list[Tensor]:
    """R⁻¹[V b]C⁻¹ for V (B, O, I) and b (B, O)."""
    n = v.shape[-1]
    if factor_matrix.is_diagonal(right):
        weight = _by_right(_by_left(left, v), right)
        return [weight, (_by_left(left, b[..., None]) * right[:, None, n : n + 1])[..., 0]]
    both = v.new_empty(*v.shape[:2], right.shape[-1])
    _by_left(left, v, both[..., :n])
    _by_left(left, b[..., None], both[..., n : n + 1])
    both[..., n + 1 :] = 0
    weight = torch.bmm(both, right[..., :n])
    return [weight, torch.bmm(both, right[..., n : n + 1])[..., 0]]


def _solved(left: Tensor, right: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    """The same with lower Cholesky factors; a diagonal side is its reciprocal."""
    v = _joined(given)
    if factor_matrix.is_diagonal(left):
        v.mul_(left[..., None])
    else:
        torch.linalg.solve_triangular(left, v, upper=False, out=v)
        torch.linalg.solve_triangular(left.mT, v, upper=True, out=v)
    if factor_matrix.is_diagonal(right):
        v.mul_(right[:, None])
    else:
        torch.linalg.solve_triangular(right.mT, v, upper=True, left=False, out=v)
        torch.linalg.solve_triangular(right, v, upper=False, left=False, out=v)
    return _parted(v, given)


def _joined(given: Sequence[Tensor]) -> Tensor:
    """[V b], in memory of its own."""
    if len(given) == 1:
        return given[0].clone(memory_format=torch.contiguous_format)
    return torch.cat([given[0], given[1][..., None]], 2)


def _parted(v: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    return [v] if len(given) == 1 else [v[..., :-1].contiguous(), v[..., -1]]


# --- float16 ------------------------------------------------------------------------------------

_LENGTH, _ENTRY = 2.0**10, 2.0**5  # of a left side's rows times √O, and of a gradient's entries
_TOP = 2.0**14  # what the largest entries of a right side become
_NARROWEST = 2.0**-20  # r at least: below it there is but round-off
_LEAST, _LEAST_SIDE = 2.0**-120, 2.0**-80  # largest entries of zeros, which are divided by
_SMALLEST, _BOTH = 512, 2560  # sides, and the sum of both, from which on it pays


def roundable(inverse: Inverse) -> bool:
    """Whether to hold it in float16: large sides on a GPU whose products may be TF32's."""
    left, right, matmul = inverse.left, inverse.right, torch.backends.cuda.matmul
    if left is None or right is None or not left.is_cuda or left.dtype != torch.float32:
        return False
    if matmul.fp32_precision != "tf32" or inverse.scale is not None or inverse.factors:
        return False
    both = left.shape[1], right.shape[1]
    dense = left.ndim == right.ndim == 3 and left.shape[1] % 8 == 0
    return dense and min(both) >= _SMALLEST and sum(both) >= _BOTH


def rounded(inverse: Inverse) -> Inverse:
    r"""The same in half the memory: float16 has as many bits as TF32, and lacks range alone.

    So both sides are divided by numbers, and the columns of a left side S ≥ 0, whose entries are
    |s_ij| ≤ √(s_ii s_jj), by r_j = √(s_jj/max s). Beside 2⁻¹¹|s_ij|, which TF32 loses too, rounding
    takes 2⁻³⁹ max s of a right side, and about 2⁻²⁸√(s_jj max s) of a left one.
    """
    left, right = inverse.left, inverse.right
    assert left is not None
    assert right is not None
    diagonal = factor_matrix.diagonal(left)
    top = diagonal.amax(1, keepdim=True).clamp(min=_LEAST_SIDE)
    rows = (diagonal / top).clamp(min=_NARROWEST**2).sqrt()
    left = left / rows[:, None]
    lengths = torch.linalg.vector_norm(left, dim=2).amax(1).clamp(min=_LEAST_SIDE)
    one = lengths * (left.shape[1] ** 0.5 / _LENGTH)
    two = factor_matrix.diagonal(right).amax(1).clamp(min=_LEAST_SIDE) / _TOP
    half = [(side / by[:, None, None]).half() for side, by in ((left, one), (right, two))]
    return Inverse(*half, rows=rows, unit=one * two)


def widened(inverse: Inverse) -> Inverse:
    """The same in float32, from float16."""
    left, right, rows, unit = (inverse.tensors()[n] for n in _ROUNDED)
    return Inverse(left.float() * (rows * unit[:, None])[:, None], right.float())


def _by_rounded(inverse: Inverse, v: Tensor, b: Tensor | None = None) -> list[Tensor]:
    r"""R⁻¹[V b]C⁻¹ = m·unit·(R̂V̂)Ĉ with V̂ = diag(r)[V b]/m, where m makes entries at most 2⁵.

    Those of R̂V̂ are then at most 2¹⁵, by Cauchy and Schwarz. Sums are in float32.
    """
    left, right, rows, unit = (inverse.tensors()[n] for n in _ROUNDED)
    wide, peaks = v.shape[2], torch.linalg.vector_norm(v, torch.inf, 2)
    if b is not None:
        peaks = torch.maximum(peaks, b.abs())
    m = torch.add(_LEAST, (peaks * rows).amax(1, keepdim=True), alpha=1 / _ENTRY)
    by, scale = rows / m, m * unit[:, None]
    given = v.new_empty(*v.shape[:2], right.shape[1], dtype=torch.float16)
    torch.mul(v, by[..., None], out=given[..., :wide])
    if b is not None:
        torch.mul(b, by, out=given[..., wide])
        wide += 1
    if wide < given.shape[2]:
        given[..., wide:] = 0
    w = _product(_product(left, given, torch.float16), right, torch.float32)
    weight = w[..., : v.shape[2]] * scale[..., None]
    return [weight] if b is None else [weight, w[..., wide - 1] * scale]


_ROUNDED = ("left", "right", "rows", "unit")
_NORM = 2.0**15  # of a matrix in float16: no rotation of it has a larger entry


def half_sides(like: Tensor) -> torch.dtype:
    """Return the dtype in which sides of norm 1 are held: float16, as exact as TF32, on a GPU."""
    return torch.float16 if like.is_cuda and like.dtype == torch.float32 else like.dtype


def rotate(
    x: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    *,
    back: bool = False,
    by: Tensor | None = None,
) -> Tensor:
    """Return UᵀXW, or back U X Wᵀ, times a number for each matrix, (B, 1, 1).

    On a GPU products keep 11 bits of each entry.
    """
    dtype = half_sides(x)
    left, right = (None if side is None else side.to(dtype) for side in (left, right))
    y, scale = to_half(x, left, right)
    y = (from_bases if back else to_bases)(left, y, right).to(x.dtype)
    for factor in (scale, by):
        y = y if factor is None else y * factor
    return y


def to_half(x: Tensor, *sides: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return X (B, m, n) for products with these sides, in float16 and a factor if they are so."""
    if all(side is None or side.dtype == x.dtype for side in sides):
        return x, None
    by = torch.linalg.matrix_norm(x, keepdim=True) / _NORM
    by = by.clamp(min=torch.finfo(x.dtype).tiny)
    return torch.div(x, by, out=x.new_empty(x.shape, dtype=torch.float16)), by


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """X Y of float16 matrices, in this dtype; sums are in float32."""
    if not x.is_cuda:
        return torch.bmm(x.float(), y.float()).to(dtype)
    return torch.bmm(x, y) if dtype == torch.float16 else torch.bmm(x, y, out_dtype=dtype)
