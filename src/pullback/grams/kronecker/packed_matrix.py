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


@dataclass(frozen=True)
class _PackingLimits:
    """Rows from which on packing a matrix pays."""

    #: in memory: below it the memory saved, 8 MiB in float32, is not worth the pass over the matrix
    in_memory: int = 2048
    #: for a message to other processes: below it the copy costs more than the bytes it saves
    sent: int = 16


_LIMITS = _PackingLimits()


@dataclass(frozen=True)
class PackedMatrix:
    """Symmetric matrices (G, n, n), held as `entries` (G, m, 2k + 1)."""

    entries: Tensor

    @classmethod
    def pack(cls, matrices: Tensor) -> PackedMatrix:
        """Pack matrices (G, n, n)."""
        n = matrices.shape[-1]
        k = n // 2
        m = n - k
        entries = matrices.new_empty(len(matrices), m, 2 * k + 1)
        entries[..., k + 1 :] = matrices[:, :m, m:]
        is_in_a = _is_on_or_below_diagonal(k, matrices.device)
        rectangle = entries[:, :k, : k + 1]
        torch.where(is_in_a, matrices[:, :k, : k + 1], matrices[:, m:, m - 1 :], out=rectangle)
        if m > k:
            entries[:, k, : k + 1] = matrices[:, k, : k + 1]
        return cls(entries)

    @property
    def shape(self) -> torch.Size:
        """(G, n, n)."""
        groups, m, columns = self.entries.shape
        n = m + columns // 2
        return torch.Size((groups, n, n))

    def unpack(self) -> Tensor:
        """Return the matrices, (G, n, n)."""
        m = self.entries.shape[1]
        k = self.entries.shape[2] // 2
        matrices = self.entries.new_empty(self.shape)
        off_diagonal = self.entries[..., k + 1 :]
        matrices[:, :m, m:] = off_diagonal
        matrices[:, m:, :m] = off_diagonal.mT
        lower_a = self.entries[..., :m].tril()
        upper_d = self.entries[:, :k, 1 : k + 1].triu()
        torch.add(lower_a, lower_a.tril(-1).mT, out=matrices[:, :m, :m])
        torch.add(upper_d, upper_d.triu(1).mT, out=matrices[:, m:, m:])
        return matrices


#: a Kronecker factor as it is held: matrices (G, n, n), packed or not, or diagonals (G, n)
FactorMatrix = Tensor | PackedMatrix


@lru_cache(8)
def _is_on_or_below_diagonal(k: int, device: torch.device) -> Tensor:
    """Whether j ≤ i, (k, k + 1)."""
    return torch.ones(k, k + 1, dtype=torch.bool, device=device).tril_()


def _pack_from(factor: FactorMatrix, rows: int) -> FactorMatrix:
    """Pack a factor if it is matrices with at least so many rows."""
    if isinstance(factor, PackedMatrix) or factor.ndim != 3 or factor.shape[-1] < rows:
        return factor
    return PackedMatrix.pack(factor)


def pack(factor: FactorMatrix) -> FactorMatrix:
    """Pack a factor if it is a large matrix."""
    return _pack_from(factor, _LIMITS.in_memory)


def pack_triangle(factor: FactorMatrix) -> FactorMatrix:
    """Pack a factor for a message to other processes, unless it is small."""
    return _pack_from(factor, _LIMITS.sent)


def pack_stacked(factors: Sequence[Tensor]) -> list[FactorMatrix]:
    """Pack factors of one shape, in one operation where they are views that fill one tensor."""
    first = factors[0]
    base = first._base
    if base is None or any([factor._base is not base for factor in factors]):
        return [pack(factor) for factor in factors]
    if base.numel() != len(factors) * first.numel():
        return [pack(factor) for factor in factors]
    stacked = pack(base.view(-1, *first.shape[1:]))
    if not isinstance(stacked, PackedMatrix):
        return list(factors)
    return [PackedMatrix(entries) for entries in stacked.entries.split(len(first))]


def unpack(factor: FactorMatrix) -> Tensor:
    """Return the factor as a tensor, (G, n, n) or (G, n)."""
    if isinstance(factor, PackedMatrix):
        return factor.unpack()
    return factor


def get_entries(factor: FactorMatrix) -> Tensor:
    """Return the tensor that holds a factor: sums and multiples may be formed of it."""
    if isinstance(factor, PackedMatrix):
        return factor.entries
    return factor


def map_entries(function: Callable[[Tensor], Tensor], factor: FactorMatrix) -> FactorMatrix:
    """Return the factor with another tensor of entries, packed where it was."""
    if isinstance(factor, PackedMatrix):
        return PackedMatrix(function(factor.entries))
    return function(factor)


def from_entries(entries: Tensor) -> FactorMatrix:
    """Return the factor that these entries hold: matrices are square unless they are packed."""
    if entries.ndim == 3 and entries.shape[1] != entries.shape[2]:
        return PackedMatrix(entries)
    return entries


def zeros_like(factor: FactorMatrix) -> FactorMatrix:
    """Return zeros, packed where `pack` would pack them."""
    entries = get_entries(factor)
    if len(factor.shape) == 3 and factor.shape[1] >= _LIMITS.in_memory:
        groups, n, _ = factor.shape
        k = n // 2
        return PackedMatrix(entries.new_zeros(groups, n - k, 2 * k + 1))
    return entries.new_zeros(factor.shape)


def launch_sum(
    factors: Iterable[FactorMatrix], processes: Processes, owners: Sequence[int] | None = None
) -> Pending[list[FactorMatrix]]:
    """Begin to sum factors over all processes; of matrices a triangle is sent.

    Where there are `owners`, each of these gets the sum, and others keep what they gave.
    """
    messages: list[Tensor] = []
    was_packed: list[bool] = []
    for factor in factors:  # one by one, so that unpacked ones need not be in memory together
        messages.append(get_entries(pack_triangle(factor)))
        was_packed.append(isinstance(factor, PackedMatrix))

    def restore(totals: list[Tensor]) -> list[FactorMatrix]:
        sums: list[FactorMatrix] = []
        for total, is_packed in zip(map(from_entries, totals), was_packed, strict=True):
            if is_packed:
                sums.append(total)
            else:
                sums.append(unpack(total))
        return sums

    if owners is None:
        return processes.launch_sum(messages, "factors").then(restore)
    totals = processes.sum_to(messages, owners, "factors")
    return Pending(lambda: restore(totals))
