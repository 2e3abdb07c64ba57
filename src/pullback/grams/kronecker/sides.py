"""One side of a Kronecker product: symmetric matrices ⪰ 0, (G, n, n), or diagonals, (G, n).

G counts groups, each with its own matrix. A long side is held as a diagonal only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.products import full_precision

_LARGE = 128  # from this size on a matrix is inverted by itself on a CPU


def is_diagonal(side: Tensor) -> bool:
    """Whether only the diagonal is held."""
    return side.ndim == 2


def diagonal(side: Tensor) -> Tensor:
    """The diagonals, (G, n)."""
    return side if is_diagonal(side) else side.diagonal(dim1=-2, dim2=-1)


def trace(side: Tensor) -> Tensor:
    """The traces, (G,)."""
    return diagonal(side).sum(-1)


def matrix(side: Tensor) -> Tensor:
    """The matrices, (G, n, n)."""
    return torch.diag_embed(side) if is_diagonal(side) else side


def add(one: Tensor, two: Tensor) -> Tensor:
    """The sum, a diagonal if both are."""
    if one.ndim == two.ndim:
        return one + two
    return matrix(one) + matrix(two)


def shifted(side: Tensor, by: Tensor, *, spare: bool = False) -> Tensor:
    """side + by·1 with one number per group, (G,); a spare side may be overwritten."""
    if is_diagonal(side):
        return side + by[:, None]
    out = side if spare else side.clone()
    out.diagonal(dim1=-2, dim2=-1).add_(by[:, None])
    return out


def multiply(left: Tensor, v: Tensor, right: Tensor) -> Tensor:
    """left · V · right for V of shape (G, O, I), the smaller intermediate product first."""
    v = left[..., None] * v if is_diagonal(left) else left @ v
    return v * right[:, None] if is_diagonal(right) else v @ right


@dataclass(frozen=True)
class Inverses:
    """Inverses of some sides, what became of them, and how many directions each has."""

    sides: list[Tensor]
    #: which of them could not be inverted
    failed: list[bool]
    #: directions used, per side and group; None where none was left out
    ranks: list[Tensor | None]


def inverses(sides: Sequence[Tensor], *, singular: bool = False, factors: bool = False) -> Inverses:
    """The inverses of many sides, matrices of the same size together.

    Args:
        sides: what to invert.
        singular: whether to invert on the range only (Moore–Penrose) where a matrix is singular to
            working precision; without it such a side has failed.
        factors: give the lower Cholesky factors of matrices instead, to solve with.
    """
    out: list[Tensor] = list(sides)
    failed = [False] * len(sides)
    ranks: list[Tensor | None] = [None] * len(sides)
    for indices in _alike(sides):
        stacked = sides[indices[0]] if len(indices) == 1 else torch.cat([sides[i] for i in indices])
        counts = [len(sides[i]) for i in indices]
        found, good = (
            _reciprocal(stacked)
            if stacked.ndim == 2
            else _cholesky(stacked, strict=singular, factors=factors)
        )
        for i, inverse, fine in zip(indices, found.split(counts), good.split(counts), strict=True):
            out[i], failed[i] = inverse, not bool(fine.all())
    if singular:
        for i, bad in enumerate(failed):
            if bad and bool(torch.isfinite(sides[i]).all()):
                out[i], ranks[i] = pseudo_inverse(sides[i])
                failed[i] = False
    return Inverses(out, failed, ranks)


def _alike(sides: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the sides by shape and dtype, but for the number of groups.

    LAPACK takes one matrix after the other, and larger ones leave the cache: each goes alone.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, side in enumerate(sides):
        alone = i if side.device.type == "cpu" and side.shape[-1] >= _LARGE else -1
        kind = (side.ndim, side.shape[-1], side.dtype, side.device, alone)
        groups.setdefault(kind, []).append(i)
    return list(groups.values())


def _reciprocal(side: Tensor) -> tuple[Tensor, Tensor]:
    good = (side > torch.finfo(side.dtype).tiny) & torch.isfinite(side)
    return torch.where(good, 1 / side, 0.0), good.all(-1)


def _cholesky(side: Tensor, *, strict: bool, factors: bool) -> tuple[Tensor, Tensor]:
    """S⁻¹ = L⁻ᵀL⁻¹, and where that is to be trusted: pivots above n·ε of their entry.

    Round-off may leave large pivots in a singular matrix whose entries differ much; a `strict`
    test looks at its condition number too.
    """
    lower, info = torch.linalg.cholesky_ex(side)
    pivots, entries = lower.diagonal(dim1=-2, dim2=-1), side.diagonal(dim1=-2, dim2=-1)
    floor = side.shape[-1] * torch.finfo(side.dtype).eps
    good = (info == 0) & (pivots.square() > floor * entries).all(-1)
    if not bool(good.all()):  # a zero pivot is an error for torch
        eye = torch.eye(side.shape[-1], dtype=side.dtype, device=side.device)
        lower = torch.where(good[:, None, None], lower, eye)
    if factors:
        return lower, good
    inverse = _inverse(lower)
    if strict:
        condition = torch.linalg.matrix_norm(side) * torch.linalg.matrix_norm(inverse)
        good = good & (condition * _round_off(side) < 1)
    return inverse, good


def _inverse(lower: Tensor) -> Tensor:
    """L⁻ᵀL⁻¹; on CUDA by products, which are faster there than LAPACK's way."""
    if not lower.is_cuda:
        return torch.cholesky_inverse(lower)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    with full_precision(lower.device, 0):
        half = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
        return half.mT @ half


def _round_off(side: Tensor) -> float:
    """What may be left of a zero eigenvalue, over the largest one."""
    # sums of outer products left up to 8 ε, at any size up to 300
    return max(side.shape[-1], 32) * torch.finfo(side.dtype).eps


def cut(values: Tensor) -> Tensor:
    """Which eigenvalues, (..., n), stand above round-off."""
    largest = values.amax(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    return values > _round_off(values) * largest


def pseudo_inverse(side: Tensor) -> tuple[Tensor, Tensor]:
    """The Moore–Penrose inverse, and its rank, (G,)."""
    if is_diagonal(side):
        keep = cut(side)
        return torch.where(keep, 1 / side, 0.0), keep.sum(-1)
    values, vectors = torch.linalg.eigh(side)
    keep = cut(values)
    weights = torch.where(keep, 1 / values, 0.0)
    return (vectors * weights[..., None, :]) @ vectors.mT, keep.sum(-1)


def eigen(side: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues (G, n), not negative, and eigenvectors (G, n, n), None for a diagonal."""
    if is_diagonal(side):
        return side.clamp(min=0), None
    values, vectors = torch.linalg.eigh(side)
    return values.clamp(min=0), vectors
