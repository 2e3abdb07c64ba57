r"""Symmetric matrices in half of their memory.

With k = ⌊n/2⌋, m = n − k and blocks A (m, m), B (m, k), D (k, k) of S = [A B; Bᵀ D], the lower
triangle of A and the upper one of D, diagonals included, fill a rectangle, and B lies beside it:

    (m, 2k + 1) = [Q B],    Q_ij = A_ij for j ≤ i,    Q_ij = D_i,j−1 for j > i.

Sums and multiples of matrices are those of the rectangles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..._core.processes import Pending, Processes

_LEAST = 2048  # rows from which on the memory is worth a pass
_LEAST_SENT = 16  # rows from which on a triangle is worth a copy where it is sent


@dataclass(frozen=True)
class Packed:
    """Symmetric (G, n, n), held as `memory` (G, m, 2k + 1)."""

    memory: Tensor

    @classmethod
    def of(cls, side: Tensor) -> Packed:
        """Pack matrices (G, n, n)."""
        n = side.shape[-1]
        k, m = n // 2, n - n // 2
        out = side.new_empty(len(side), m, 2 * k + 1)
        out[..., k + 1 :] = side[:, :m, m:]
        low, q = _below_diagonal(k, side.device), out[:, :k, : k + 1]
        torch.where(low, side[:, :k, : k + 1], side[:, m:, m - 1 :], out=q)
        if m > k:
            out[:, k, : k + 1] = side[:, k, : k + 1]
        return cls(out)

    @property
    def shape(self) -> torch.Size:
        """(G, n, n)."""
        groups, m, wide = self.memory.shape
        return torch.Size((groups, m + wide // 2, m + wide // 2))

    def whole(self) -> Tensor:
        """Return the matrices, (G, n, n)."""
        m, k = self.memory.shape[1], self.memory.shape[2] // 2
        out = self.memory.new_empty(self.shape)
        beside = self.memory[..., k + 1 :]
        out[:, :m, m:], out[:, m:, :m] = beside, beside.mT
        a, d = self.memory[..., :m].tril(), self.memory[:, :k, 1 : k + 1].triu()
        torch.add(a, a.tril(-1).mT, out=out[:, :m, :m])
        torch.add(d, d.triu(1).mT, out=out[:, m:, m:])
        return out


@lru_cache(8)
def _below_diagonal(k: int, device: torch.device) -> Tensor:
    """Whether j ≤ i, (k, k + 1)."""
    return torch.ones(k, k + 1, dtype=torch.bool, device=device).tril_()


def packed(side: Tensor | Packed) -> Tensor | Packed:
    """Pack a side if it is a large matrix."""
    if isinstance(side, Packed) or side.ndim < 3 or side.shape[-1] < _LEAST:
        return side
    return Packed.of(side)


def packed_together(sides: Sequence[Tensor]) -> list[Tensor | Packed]:
    """Pack sides of one shape, at once where they are all that lies in one piece of memory."""
    first, base = sides[0], sides[0]._base
    alike = all([side._base is base for side in sides])
    if base is None or not alike or base.numel() != len(sides) * first.numel():
        return [packed(side) for side in sides]
    every = packed(base.view(-1, *first.shape[1:]))
    if not isinstance(every, Packed):
        return list(sides)
    return [Packed(part) for part in every.memory.split(len(first))]


def whole(side: Tensor | Packed) -> Tensor:
    """Return the side as a tensor."""
    return side.whole() if isinstance(side, Packed) else side


def memory(side: Tensor | Packed) -> Tensor:
    """Return the memory of a side: what sums and multiples may be formed of."""
    return side.memory if isinstance(side, Packed) else side


def map_memory(change: Callable[[Tensor], Tensor], side: Tensor | Packed) -> Tensor | Packed:
    """Return the side with its memory changed, packed where it was."""
    return Packed(change(side.memory)) if isinstance(side, Packed) else change(side)


def zeros_like(side: Tensor | Packed) -> Tensor | Packed:
    """Return zeros, packed where such a side is."""
    groups, *rest = side.shape
    held = memory(side)
    if len(rest) == 2 and rest[0] >= _LEAST:  # a matrix, not gains of a unit
        k = rest[0] // 2
        return Packed(held.new_zeros(groups, rest[0] - k, 2 * k + 1))
    return held.new_zeros(side.shape)


def as_side(held: Tensor) -> Tensor | Packed:
    """Return the side that this memory belongs to: matrices are square unless they are packed."""
    return Packed(held) if held.ndim == 3 and held.shape[1] != held.shape[2] else held


Side = Tensor | Packed


def launch_sides(
    sides: Iterable[Side], processes: Processes, owners: Sequence[int] | None = None
) -> Pending[list[Side]]:
    """Begin to sum sides over all processes; of matrices a triangle is sent.

    Where there are `owners`, each of these gets the sum, and others keep what they gave.
    """
    tensors: list[Tensor] = []
    packed: list[bool] = []  # whether they are so here
    for side in sides:  # one by one, so that whole ones need not be in memory together
        tensors.append(memory(triangle(side)))
        packed.append(isinstance(side, Packed))

    def restore(found: list[Tensor]) -> list[Side]:
        every = zip(map(as_side, found), packed, strict=True)
        return [total if held else whole(total) for total, held in every]

    if owners is None:
        return processes.launch_sum(tensors, "factors").then(restore)
    found = processes.sum_to(tensors, owners, "factors")
    return Pending(lambda: restore(found))


def triangle(side: Side) -> Side:
    """Return a symmetric side in the form that is sent: packed, unless it is small."""
    if isinstance(side, Packed) or side.ndim != 3 or side.shape[-1] < _LEAST_SENT:
        return side
    return Packed.of(side)
