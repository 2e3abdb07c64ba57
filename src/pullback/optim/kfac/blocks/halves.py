r"""Symmetric matrices in half of their memory.

With k = ⌊n/2⌋, m = n − k and blocks A (m, m), B (m, k), D (k, k) of S = [A B; Bᵀ D], the lower
triangle of A and the upper one of D, diagonals included, fill a rectangle, and B lies beside it:

    (m, 2k + 1) = [Q B],    Q_ij = A_ij for j ≤ i,    Q_ij = D_i,j−1 for j > i.

Averages of matrices are those of the rectangles.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_LEAST = 2048  # rows from which on the memory is worth two launches


@dataclass(frozen=True)
class Half:
    """Symmetric (G, n, n), held as (G, m, 2k + 1); `low` is where Q is of A, (k, k + 1)."""

    memory: Tensor
    low: Tensor

    @classmethod
    def of(cls, side: Tensor) -> Half:
        """Of matrices (G, n, n)."""
        n = side.shape[-1]
        k, m = n // 2, n - n // 2
        out = side.new_empty(len(side), m, 2 * k + 1)
        out[..., k + 1 :] = side[:, :m, m:]
        low = _low(k, side.device)
        torch.where(low, side[:, :k, : k + 1], side[:, m:, m - 1 :], out=out[:, :k, : k + 1])
        if m > k:
            out[:, k, : k + 1] = side[:, k, : k + 1]
        return cls(out, low)

    @cached_property
    def shape(self) -> torch.Size:
        """(G, n, n)."""
        groups, m, wide = self.memory.shape
        return torch.Size((groups, m + wide // 2, m + wide // 2))

    def chunk(self, count: int) -> list[Half]:
        """As many parts of the same memory, along the first axis."""
        return [Half(part, self.low) for part in self.memory.chunk(count)]

    def whole(self) -> Tensor:
        """The matrices, (G, n, n)."""
        m, k = self.memory.shape[1], self.memory.shape[2] // 2
        out = self.memory.new_empty(self.shape)
        beside = self.memory[..., k + 1 :]
        out[:, :m, m:], out[:, m:, :m] = beside, beside.mT
        a, d = self.memory[..., :m].tril(), self.memory[:, :k, 1 : k + 1].triu()
        torch.add(a, a.tril(-1).mT, out=out[:, :m, :m])
        torch.add(d, d.triu(1).mT, out=out[:, m:, m:])
        return out


def halved(side: Tensor) -> bool:
    """Whether a side (G, n, n) is to be held so: on a GPU, where memory is short."""
    return side.is_cuda and side.ndim == 3 and side.shape[-1] >= _LEAST


#: one for all that are alive
_LOWS: weakref.WeakValueDictionary[tuple[int, torch.device], Tensor] = weakref.WeakValueDictionary()


def _low(k: int, device: torch.device) -> Tensor:
    """Whether j ≤ i, (k, k + 1)."""
    low = _LOWS.get((k, device))
    if low is None:
        low = torch.ones(k, k + 1, dtype=torch.bool, device=device).tril_()
        _LOWS[k, device] = low
    return low
