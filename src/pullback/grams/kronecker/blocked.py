r"""Inverses of many matrices of different sizes at once, by products: S = LLᵀ, S⁻¹ = L⁻ᵀL⁻¹.

Each matrix is filled up to a whole number of panels with an identity. In panel k, with rows below
it written as i ≥ k,

    T_ik = S_ik − Σ_{j<k} L_ij L_kjᵀ,   L_kk L_kkᵀ = T_kk,   W_kk = L_kk⁻¹,   L_ik = T_ik W_kkᵀ,

and T_kk of all sizes are factorized together, so that a chain of small kernels is as long as that
of the largest matrix. Neighboring diagonal blocks of W = L⁻¹ are then joined,

    [L₁₁ 0; L₂₁ L₂₂]⁻¹ = [W₁₁ 0; −W₂₂L₂₁W₁₁ W₂₂],

twice as large each time. Nothing waits for the device: what failed is told by a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._core.products import full_precision

PANEL = 256
_PARTS = 4  # of W in WᵀW, whose product with zeros is left out


def padded(n: int, panel: int | None = None) -> int:
    """n filled up to whole panels."""
    panel = PANEL if panel is None else panel
    return -(-n // panel) * panel


def room(count: int, n: int, like: Tensor, panel: int | None = None) -> Tensor:
    """Where `count` matrices up to n×n can be written, (count, m, m): identities."""
    m = padded(n, panel)
    out = like.new_zeros(count, m, m)
    out.diagonal(dim1=-2, dim2=-1).fill_(1)
    return out


def _part(
    t: Tensor, rows: tuple[int, int], columns: tuple[int, int], *, turn: bool = False
) -> Tensor:
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


class _Stack:
    """Matrices of one size: `lower` is S at first, L below the diagonal blocks, and S⁻¹ at last."""

    def __init__(self, lower: Tensor, panel: int) -> None:
        self.lower, self.panel = lower, panel
        self.count, self.size = lower.shape[:2]
        self.entries = lower.diagonal(dim1=-2, dim2=-1).clone()
        #: W
        self.half = torch.zeros_like(lower)
        #: where a diagonal block had no factor
        self.broken: list[Tensor] = []

    def column(self, k: int) -> Tensor:
        """T_ik for i ≥ k, (B, rows, panel)."""
        a, b, end = k * self.panel, (k + 1) * self.panel, self.size
        now = _part(self.lower, (a, end), (a, b))
        if not k:
            return now.clone()
        before = _part(self.lower, (a, end), (0, a))
        return torch.baddbmm(now, before, _part(self.lower, (a, b), (0, a), turn=True), alpha=-1)

    def enter(self, k: int, column: Tensor, inverse: Tensor, broken: Tensor) -> None:
        """L_ik for i > k, from W_kk."""
        a, b, end = k * self.panel, (k + 1) * self.panel, self.size
        self.broken.append(broken)
        _part(self.half, (a, b), (a, b)).copy_(inverse)
        if b < end:
            rest = column.narrow(1, self.panel, end - b)
            torch.bmm(rest, inverse.mT, out=_part(self.lower, (b, end), (a, b)))

    def good(self) -> Tensor:
        """Which factorizations are to be trusted, (B,): pivots are 1/W_jj."""
        floor = self.size * torch.finfo(self.lower.dtype).eps
        low = self.half.diagonal(dim1=-2, dim2=-1).square() * (floor * self.entries)
        return (low < 1).all(-1) & (torch.stack(self.broken).amax(0) == 0)

    def join(self) -> None:
        """W from its diagonal blocks."""
        size, count, rest = self.panel, self.size // self.panel, 0
        while count > 1 or (count and rest):
            self._join_pairs(size, count // 2)
            if count % 2:
                start = (count - 1) * size
                if rest:
                    self._join_last(start, size, rest)
                rest += size
            size, count = 2 * size, count // 2

    def _join_pairs(self, size: int, count: int) -> None:
        """All neighbors of one size together."""
        if not count:
            return
        first, last = (_pairs(self.half, size, count, i, i) for i in (0, 1))
        below = _pairs(self.lower, size, count, 1, 0)
        torch.neg(last @ (below @ first), out=_pairs(self.half, size, count, 1, 0))

    def _join_last(self, start: int, size: int, rest: int) -> None:
        """The one that has no neighbor of its size with the shorter rest."""
        one, two = (start, start + size), (start + size, start + size + rest)
        below = torch.bmm(_part(self.lower, two, one), _part(self.half, one, one))
        below = torch.bmm(_part(self.half, two, two), below)
        torch.neg(below, out=_part(self.half, two, one))

    def square(self) -> Tensor:
        """S⁻¹ = WᵀW, written over L."""
        w, out, end = self.half, self.lower, self.size
        step = max(self.panel, -(-end // _PARTS))
        for a in range(0, end, step):
            b = min(a + step, end)
            left = _part(w, (a, end), (a, b), turn=True)
            torch.bmm(left, _part(w, (a, end), (0, b)), out=_part(out, (a, b), (0, b)))
            if a:
                _part(out, (0, a), (a, b)).copy_(_part(out, (a, b), (0, a), turn=True))
        return out


def invert(stacks: Sequence[Tensor], panel: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """The inverses, in the same memory, and which of them are to be trusted, (B,).

    Args:
        stacks: symmetric matrices (B, m, m) of one dtype and device, from `room`.
        panel: what the sizes m are multiples of.

    A matrix is trusted where it has a factor whose pivots all stand above m·ε of their entry.
    """
    if not stacks:
        return []
    panel = PANEL if panel is None else panel
    held = [_Stack(s, panel) for s in stacks]
    eye = torch.eye(panel, dtype=stacks[0].dtype, device=stacks[0].device)
    with full_precision(stacks[0].device, 0):
        for k in range(max(s.size for s in held) // panel):
            _advance([s for s in held if k * panel < s.size], k, eye)
        out = []
        for stack in held:
            stack.join()
            out.append((stack.square(), stack.good()))
    return out


def _advance(active: Sequence[_Stack], k: int, eye: Tensor) -> None:
    """One panel of all that have it."""
    columns = [s.column(k) for s in active]
    lower, broken = torch.linalg.cholesky_ex(torch.cat([c.narrow(1, 0, len(eye)) for c in columns]))
    inverse = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    counts = [s.count for s in active]
    found = (t.split(counts) for t in (inverse, broken))
    for stack, column, *parts in zip(active, columns, *found, strict=True):
        stack.enter(k, column, *parts)
