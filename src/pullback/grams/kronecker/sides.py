"""One side of a Kronecker product: symmetric matrices ⪰ 0, (G, n, n), or diagonals, (G, n).

G counts groups, each with its own matrix. A long side is held as a diagonal only.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def round_off(side: Tensor) -> float:
    """What may be left of a zero eigenvalue, over the largest one."""
    # sums of outer products left up to 8 ε, at any size up to 300
    return max(side.shape[-1], 32) * torch.finfo(side.dtype).eps


def cut(values: Tensor) -> Tensor:
    """Which eigenvalues, (..., n), stand above round-off."""
    largest = values.amax(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    return values > round_off(values) * largest


def pseudo_inverse(side: Tensor) -> tuple[Tensor, Tensor]:
    """The Moore–Penrose inverse, and its rank, (G,)."""
    values, vectors = eigen(side)
    keep = cut(values)
    weights = torch.where(keep, 1 / values, 0.0)
    inverse = weights if vectors is None else (vectors * weights[..., None, :]) @ vectors.mT
    return inverse, keep.sum(-1)


def eigen(side: Tensor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues (G, n), not negative, and eigenvectors (G, n, n), None for a diagonal."""
    if is_diagonal(side):
        return side.clamp(min=0), None
    values, vectors = torch.linalg.eigh(side)
    return values.clamp(min=0), vectors
