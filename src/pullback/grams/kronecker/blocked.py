r"""Inverses of many matrices of different sizes at once, by products: S = LLᵀ, S⁻¹ = UUᵀ, U = L⁻ᵀ.

In panel k, with rows below it written as i ≥ k,

    T_ik = S_ik − Σ_{j<k} L_ij L_kjᵀ,   L_kk L_kkᵀ = T_kk,   U_kk = L_kk⁻ᵀ,   L_ik = T_ik U_kk,

and T_kk of all sizes are factorized together, so that a chain of small kernels is as long as that
of the largest matrix. Neighboring diagonal blocks of U are then joined, twice as large each time,

    [L₁₁ 0; L₂₁ L₂₂]⁻ᵀ = [U₁₁ −U₁₁L₂₁ᵀU₂₂; 0 U₂₂].

All of it happens in the matrix's own memory: L stands below the diagonal and U from there upwards,
and S⁻¹ at last where L was. A product with a large triangle is one with its strips, so that most
of its zeros are left out: about 1.3 n³ flops, where n³ is the least. Nothing waits for the
device: what failed is told by a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._core.products import full_precision

PANEL = 256
_FINE = 8  # sizes are whole eighths of a panel
_STRIPS = 4  # of a triangle that is multiplied with, at most
_SQUARE = 8  # of U in UUᵀ, at most
_WORTH = 2**30  # flops that are worth a kernel of their own

Span = tuple[int, int]


def padded(n: int, panel: int | None = None) -> int:
    """n filled up to what products are fast with."""
    step = max(1, (PANEL if panel is None else panel) // _FINE)
    return -(-n // step) * step


def room(count: int, n: int, like: Tensor, panel: int | None = None) -> Tensor:
    """Where `count` matrices up to n×n can be written, (count, m, m): identities."""
    m = padded(n, panel)
    out = like.new_zeros(count, m, m)
    out.diagonal(dim1=-2, dim2=-1).fill_(1)
    return out


def _part(t: Tensor, rows: Span, columns: Span, *, turn: bool = False) -> Tensor:
    """t[:, rows, columns] of (B, m, m), or its transposes, as one operation instead of three."""
    (a, b), (c, d), (batch, high, wide) = rows, columns, t.stride()
    start = t.storage_offset() + a * high + c * wide
    if turn:
        return t.as_strided((t.shape[0], d - c, b - a), (batch, wide, high), start)
    return t.as_strided((t.shape[0], b - a, d - c), (batch, high, wide), start)


def _pairs(t: Tensor, size: int, count: int, row: int, column: int) -> Tensor:
    """Block (row, column) of each pair of neighbors on the diagonal: (B, count, size, size)."""
    batch, high, wide = t.stride()
    strides = (batch, 2 * size * (high + wide), high, wide)
    start = t.storage_offset() + size * (row * high + column * wide)
    return t.as_strided((t.shape[0], count, size, size), strides, start)


def _strips(span: Span, panel: int, most: int, flops: int) -> list[Span]:
    """The span cut into pieces for so many flops, none shorter than a panel but the last."""
    start, end = span
    step = max(panel, -(-(end - start) // max(1, min(most, flops // _WORTH))))
    return [(a, min(a + step, end)) for a in range(start, end, step)]


class _Stack:
    """Matrices of one size: `held` is S at first, L and U, and S⁻¹ at last."""

    def __init__(self, held: Tensor, panel: int) -> None:
        self.held, self.panel = held, panel
        self.count, self.size = held.shape[:2]
        self.entries = held.diagonal(dim1=-2, dim2=-1).clone()
        #: where a diagonal block had no factor
        self.broken: list[Tensor] = []

    def _span(self, k: int) -> Span:
        return k * self.panel, min((k + 1) * self.panel, self.size)

    def column(self, k: int) -> Tensor:
        """T_ik for i ≥ k, (B, rows, columns)."""
        a, b = self._span(k)
        now = _part(self.held, (a, self.size), (a, b))
        if not k:
            return now.clone()
        before = _part(self.held, (a, self.size), (0, a))
        return torch.baddbmm(now, before, _part(self.held, (a, b), (0, a), turn=True), alpha=-1)

    def enter(self, k: int, column: Tensor, upper: Tensor, broken: Tensor) -> None:
        """L_ik for i > k, from U_kk, which may be filled up."""
        a, b = self._span(k)
        upper = upper[:, : b - a, : b - a]
        self.broken.append(broken)
        _part(self.held, (a, b), (a, b)).copy_(upper)
        if b < self.size:
            rest = column.narrow(1, b - a, self.size - b)
            torch.bmm(rest, upper, out=_part(self.held, (b, self.size), (a, b)))

    def good(self) -> Tensor:
        """Which factorizations are to be trusted, (B,): pivots are 1/U_jj."""
        floor = self.size * torch.finfo(self.held.dtype).eps
        low = self.held.diagonal(dim1=-2, dim2=-1).square() * (floor * self.entries)
        return (low < 1).all(-1) & (torch.stack(self.broken).amax(0) == 0)

    def join(self) -> None:
        """U from its diagonal blocks; below them zeros take the place of L."""
        size, count, rest = self.panel, self.size // self.panel, self.size % self.panel
        while count > 1 or (count and rest):
            self._join_pairs(size, count // 2)
            if count % 2:
                start = (count - 1) * size
                if rest:
                    self._join(start, size, rest)
                rest += size
            size, count = 2 * size, count // 2

    def _join_pairs(self, size: int, count: int) -> None:
        """All neighbors of one size: together, or one by one where they are large."""
        if size > self.panel or count == 1:
            for i in range(count):
                self._join(2 * i * size, size, size)
        elif count:
            first, last = (_pairs(self.held, size, count, i, i) for i in (0, 1))
            below = _pairs(self.held, size, count, 1, 0)
            torch.neg(first @ (below.mT @ last), out=_pairs(self.held, size, count, 0, 1))
            below.zero_()

    def _join(self, start: int, size: int, rest: int) -> None:
        """A block and the next one, which may have another size."""
        held, one, two = self.held, (start, start + size), (start + size, start + size + rest)
        product, flops = held.new_empty(self.count, size, rest), 2 * self.count * size * rest
        for c, d in _strips(two, self.panel, _STRIPS, flops * rest):
            below = _part(held, (two[0], d), one, turn=True)
            strip = product.narrow(2, c - two[0], d - c)
            torch.bmm(below, _part(held, (two[0], d), (c, d)), out=strip)
        for a, b in _strips(one, self.panel, _STRIPS, flops * size):
            out, left = _part(held, (a, b), two), _part(held, (a, b), (a, one[1]))
            lower = product.narrow(1, a - start, one[1] - a)
            torch.baddbmm(out, left, lower, beta=0, alpha=-1, out=out)
        _part(held, two, one).zero_()

    def square(self) -> Tensor:
        """S⁻¹ = UUᵀ, strip by strip: what is read of U later on lies above and to the right."""
        held, end = self.held, self.size
        strips = _strips((0, end), self.panel, _SQUARE, 2 * self.count * end**3)
        for a, b in strips:
            left = _part(held, (a, b), (a, end))
            if a:
                right = _part(held, (0, a), (a, end), turn=True)
                torch.bmm(left, right, out=_part(held, (a, b), (0, a)))
            corner = torch.bmm(left, left.mT)
            _part(held, (a, b), (a, b)).copy_(corner)
        for a, b in strips[1:]:
            _part(held, (0, a), (a, b)).copy_(_part(held, (a, b), (0, a), turn=True))
        return held


def invert(stacks: Sequence[Tensor], panel: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """The inverses, in the same memory, and which of them are to be trusted, (B,).

    Args:
        stacks: symmetric matrices (B, m, m) of one dtype and device, from `room`.
        panel: the columns that are factorized at a time.

    A matrix is trusted where it has a factor whose pivots all stand above m·ε of their entry.
    """
    if not stacks:
        return []
    panel = PANEL if panel is None else panel
    held = [_Stack(s, panel) for s in stacks]
    eye = torch.eye(panel, dtype=stacks[0].dtype, device=stacks[0].device)
    with full_precision(stacks[0].device, 0):
        for k in range(-(-max(s.size for s in held) // panel)):
            _advance([s for s in held if k * panel < s.size], k, eye)
        out = []
        for stack in held:
            good = stack.good()
            stack.join()
            out.append((stack.square(), good))
    return out


def _advance(active: Sequence[_Stack], k: int, eye: Tensor) -> None:
    """One panel of all that have it."""
    columns = [s.column(k) for s in active]
    lower, broken = torch.linalg.cholesky_ex(torch.cat([_filled(c, eye) for c in columns]))
    upper = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False).mT
    counts = [s.count for s in active]
    found = (t.split(counts) for t in (upper, broken))
    for stack, column, *parts in zip(active, columns, *found, strict=True):
        stack.enter(k, column, *parts)


def _filled(column: Tensor, eye: Tensor) -> Tensor:
    """T_kk, the last and shorter one of a matrix filled up with an identity."""
    n = column.shape[2]
    if n == len(eye):
        return column.narrow(1, 0, n)
    out = eye.repeat(len(column), 1, 1)
    out[:, :n, :n] = column
    return out
