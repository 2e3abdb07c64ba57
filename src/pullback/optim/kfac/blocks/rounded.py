r"""Inverses in half their memory, where products may be TF32's: float16 keeps as many bits.

What it lacks is range. So the columns of a symmetric S ≥ 0, with |s_ij| ≤ √(s_ii s_jj), are divided
by c_j = √(s_jj/max s), and the matrix by a number, so that its entries are at most 2¹⁴. Beside
2⁻¹¹|s_ij|, which TF32 loses too, rounding then takes 2⁻³⁹√(s_jj max s) at most. What is multiplied
by S is multiplied by c, and by a number that makes its own entries as large:

    V̂ = diag(r) V/m,  Û = R̂V̂ diag(c)/n:        R⁻¹V C⁻¹ = m n·unit·Û Ĉ,

with sums in float32, whose range the products of such factors do not leave. Weight and bias are one
matrix here: as gradients and directions are passed over anyway, its odd shape costs nothing. It
pays where kernels of our own make five passes of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...._core.compiled import kernels
from ....grams.kronecker import sides
from ..statistics.sums import Key
from .inverse import Inverse

_TOP = 2.0**14  # what the largest entries become
_NARROWEST = 2.0**-20  # c at least: below it there is but round-off
_LEAST, _LEAST_SIDE = 2.0**-120, 2.0**-80  # largest entries of zeros, which are divided by
_ALIGNED = 8  # entries that rows are a multiple of: tensor cores read no others
_SMALLEST, _BOTH = 512, 2560  # sides, and the sum of both, from which faster products pay


@dataclass(kw_only=True)
class Rounded(Inverse):
    """An inverse with sides in float16; a joined bias is a coordinate of the right one again.

    `left` is R⁻¹ with its columns over `rows`, (G, O), `right` is C⁻¹ with its rows over `columns`,
    (G, I), and their product is to be multiplied by `unit`, (G,). With a bias, a right side has
    eight more coordinates: the bias and zeros.
    """

    rows: Tensor
    columns: Tensor
    unit: Tensor
    joint: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients that it is applied to."""
        return self.unit.dtype

    def moved(self, *to: Any) -> Inverse:
        """The same on another device, or widened to another dtype."""
        device, dtype = to
        if dtype != self.dtype:
            return self.widened().moved(device, dtype)
        there = {n: None if t is None else t.to(device) for n, t in self.tensors().items()}
        return Rounded(**{**vars(self), **there})

    def widened(self) -> Inverse:
        """The same in float32; `unit` goes to the left side."""
        left, right = self._sides
        left = left.to(self.dtype) * (self.rows * self.unit[:, None])[:, None]
        right = right.to(self.dtype) * self.columns[..., None]
        if not self.joint:
            return Inverse(left, right)
        n = right.shape[1] - _ALIGNED
        return Inverse(left, right[:, :n, :n], right[:, n, :n], right[:, n, n])

    @property
    def _sides(self) -> tuple[Tensor, Tensor]:
        assert self.left is not None
        assert self.right is not None
        return self.left, self.right

    def __call__(
        self, v: Tensor, b: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> list[Tensor]:
        """R⁻¹[V b]C⁻¹ for V (G, O, I) and b (G, O), in given memory where there is some."""
        work = None if v.shape[2] % _ALIGNED else kernels("rounding", v.device)
        if work is not None:
            return self._in_passes(work, v, b, weight, bias)
        left, right = self._sides
        largest = torch.linalg.vector_norm(v, inf, 2)
        largest = largest if b is None else torch.hypot(largest, b)  # at least either
        by, m = _range(self.rows, largest)
        u = product(left, self._gathered(v, b, by[..., None]))
        by, n = _range(self.columns, torch.linalg.vector_norm(u, inf, 1))
        u = torch.mul(u, by[:, None], out=_half(u, u.shape))
        w = product(u, right)
        scale, wide = n.mul_(self.unit[:, None]).mul_(m), v.shape[2]
        found = [torch.mul(w[..., :wide], scale[..., None], out=weight)]
        return found if b is None else [*found, torch.mul(w[..., wide], scale, out=bias)]

    def _in_passes(
        self, work: Any, v: Tensor, b: Tensor | None, weight: Tensor | None, bias: Tensor | None
    ) -> list[Tensor]:
        left, right = self._sides
        v, b, wide = v.contiguous(), None if b is None else b.contiguous(), v.shape[2]
        m = work.peaks(v, b, self.rows, wide, across=False, top=_TOP, least=_LEAST)
        u = product(left, work.shortened(v, b, self.rows, wide, m, across=False))
        n = work.peaks(u, None, self.columns, wide, across=True, top=_TOP, least=_LEAST)
        u = work.shortened(u, None, self.columns, wide, n, across=True)
        found = [torch.empty_like(v) if weight is None else weight]
        if b is not None:
            found.append(torch.empty_like(b) if bias is None else bias)
        work.scaled(product(u, right), m, n, self.unit, *found)
        return found

    def _gathered(self, v: Tensor, b: Tensor | None, by: Tensor) -> Tensor:
        """[V b] times a number for each row, in float16; the bias fills what meets zeros, too."""
        out, wide = _half(v, (*v.shape[:2], self.columns.shape[1])), v.shape[2]
        torch.mul(v, by, out=out[..., :wide])
        if b is not None:
            torch.mul(b[..., None].expand(-1, -1, _ALIGNED), by, out=out[..., wide:])
        return out


def _half(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_empty(shape, dtype=torch.float16)


def _range(by: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """by/m (G, n) and m (G, 1), for entries up to `largest` to become 2¹⁴ at most."""
    m = torch.addcmul(_least(by.device), largest, by, value=1 / _TOP).amax(1, keepdim=True)
    return by / m, m


@cache
def _least(device: torch.device) -> Tensor:
    """There for good: the kernel takes no number from the host."""
    return torch.full((), _LEAST, dtype=torch.float32, device=device)


def product(x: Tensor, y: Tensor) -> Tensor:
    """X Y of float16 matrices, in float32."""
    if x.is_cuda:
        return torch.bmm(x, y, out_dtype=torch.float32)
    return torch.bmm(x.float(), y.float())


def tf32() -> bool:
    """Whether products of float32 matrices on a GPU may be rounded to TF32's bits."""
    matmul: Any = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" and not matmul.allow_fp16_accumulation


def roundable(inverse: Inverse) -> bool:
    """Whether it is to be held in float16: two large dense sides on a GPU, and kernels for it."""
    left, right = inverse.left, inverse.right
    if left is None or right is None or inverse.factors or inverse.scale is not None:
        return False
    if sides.is_diagonal(left) or sides.is_diagonal(right) or left.dtype != torch.float32:
        return False
    both = left.shape[1], right.shape[1]
    large = min(both) >= _SMALLEST and sum(both) >= _BOTH
    fit = left.is_cuda and large and not any(n % _ALIGNED for n in both) and tf32()
    return fit and kernels("rounding", left.device) is not None


def shortened(found: Mapping[Key, Inverse]) -> dict[Key, Inverse]:
    """The same inverses, in float16 where they are to be held so."""
    kinds: dict[tuple[object, ...], dict[Key, Inverse]] = {}
    for key, inverse in found.items():
        if roundable(inverse):
            kinds.setdefault(inverse.kind, {})[key] = inverse
    out = dict(found)
    for some in kinds.values():
        out |= zip(some, rounded(list(some.values())), strict=True)
    return out


def rounded(members: Sequence[Inverse]) -> list[Rounded]:
    """Inverses of one kind, with dense sides, in float16: parts of one stack."""
    lefts = [m.left for m in members if m.left is not None]
    rows, top = _scales(_diagonals(lefts))
    left = _half(rows, (*rows.shape, rows.shape[1]))
    _multiply(lefts, 1 / (rows * top)[:, None], left)
    right, columns, also = _right(members)
    parts, counts = (left, right, rows, columns, (top * also)[:, 0]), [len(x) for x in lefts]
    joint = members[0].border is not None
    return [
        Rounded(a, c, rows=r, columns=w, unit=u, joint=joint)
        for a, c, r, w, u in zip(*(t.split(counts) for t in parts), strict=True)
    ]


def _right(members: Sequence[Inverse]) -> tuple[Tensor, Tensor, Tensor]:
    """Right sides, what their rows were divided by, and the whole."""
    given = [m.right for m in members if m.right is not None]
    diagonals, n = _diagonals(given), given[0].shape[1]
    if members[0].border is None:
        columns, top = _scales(diagonals)
        right, by = _half(columns, (*columns.shape, n)), 1 / (columns * top)
    else:
        q = torch.cat([m.border for m in members if m.border is not None])
        s = torch.cat([m.corner for m in members if m.corner is not None])[:, None]
        columns, top = _scales(torch.cat([diagonals, s], 1))
        by = 1 / (columns * top)
        right = _half(by, (len(by), n + _ALIGNED, n + _ALIGNED))
        right[:, n:], right[..., n:] = 0, 0
        torch.mul(q, by[:, :n], out=right[:, :n, n])
        torch.mul(torch.cat([q, s], 1), by[:, n:], out=right[:, n, : n + 1])
        columns = pad(columns, (0, _ALIGNED - 1))
    _multiply(given, by[:, :n, None], right[:, :n, :n])
    return right, columns, top


def _diagonals(matrices: Sequence[Tensor]) -> Tensor:
    return torch.cat([sides.diagonal(x) for x in matrices])


def _multiply(matrices: Sequence[Tensor], by: Tensor, out: Tensor) -> None:
    """One after the other, to where a stack of all is."""
    counts = [len(x) for x in matrices]
    for x, f, room in zip(matrices, by.split(counts), out.split(counts), strict=True):
        torch.mul(x, f, out=room)


def _scales(diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """√(s_ii/max s), (G, n), and max s/2¹⁴, (G, 1)."""
    top = diagonal.amax(1, keepdim=True).clamp(min=_LEAST_SIDE)
    return (diagonal / top).clamp(min=_NARROWEST**2).sqrt(), top / _TOP
