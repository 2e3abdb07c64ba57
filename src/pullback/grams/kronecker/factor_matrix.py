"""One factor of a Kronecker product: symmetric matrices ⪰ 0, (G, n, n), or diagonals, (G, n).

G counts groups, each with its own matrix. A factor with many rows is held as a diagonal only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_diagonal(factor: Tensor) -> bool:
    """Return True if only the diagonal is held."""
    return factor.ndim == 2


def diagonal(factor: Tensor) -> Tensor:
    """Return the diagonals, (G, n)."""
    if is_diagonal(factor):
        return factor
    return factor.diagonal(dim1=-2, dim2=-1)


def trace(factor: Tensor) -> Tensor:
    """Return the traces, (G,)."""
    return diagonal(factor).sum(-1)


def to_matrix(factor: Tensor) -> Tensor:
    """Return the matrices, (G, n, n)."""
    if is_diagonal(factor):
        return torch.diag_embed(factor)
    return factor


def add(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum, a diagonal if both are."""
    if first.ndim == second.ndim:
        return first + second
    return to_matrix(first) + to_matrix(second)


def per_group(numbers: Tensor, factor: Tensor) -> Tensor:
    """Return numbers (G,) in a shape that broadcasts against a factor."""
    return numbers.view(-1, *[1] * (factor.ndim - 1))


def add_identity(factor: Tensor, multiples: Tensor, *, overwrite: bool = False) -> Tensor:
    """Return factor + multiples·1, with one multiple per group, (G,).

    With `overwrite` a matrix is changed in place.
    """
    if is_diagonal(factor):
        return factor + multiples[:, None]
    out = factor if overwrite else factor.clone()
    out.diagonal(dim1=-2, dim2=-1).add_(multiples[:, None])
    return out


def multiply(output_factor: Tensor, v: Tensor, input_factor: Tensor) -> Tensor:
    """Return R V C for V of shape (G, O, I), R (G, O, O) or (G, O), C (G, I, I) or (G, I)."""
    if is_diagonal(output_factor):
        v = output_factor[..., None] * v
    else:
        v = output_factor @ v
    if is_diagonal(input_factor):
        return v * input_factor[:, None]
    return v @ input_factor


def round_off(factor: Tensor) -> float:
    """Return what round-off may leave of a zero eigenvalue, as a share of the largest one."""
    # sums of outer products left up to 8 ε, at any size up to 300
    return max(factor.shape[-1], 32) * torch.finfo(factor.dtype).eps


def is_above_round_off(eigenvalues: Tensor) -> Tensor:
    """Return a mask of the eigenvalues, (..., n), that are not just round-off of the largest."""
    tiny = torch.finfo(eigenvalues.dtype).tiny
    largest = eigenvalues.amax(-1, keepdim=True).clamp(min=tiny)
    return eigenvalues > round_off(eigenvalues) * largest


def pseudo_inverse(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Moore–Penrose inverse, and its rank, (G,)."""
    eigenvalues, eigenvectors = eigendecompose(factor)
    in_range = is_above_round_off(eigenvalues)
    reciprocals = torch.where(in_range, 1 / eigenvalues, 0.0)
    rank = in_range.sum(-1)
    if eigenvectors is None:
        return reciprocals, rank
    return (eigenvectors * reciprocals[..., None, :]) @ eigenvectors.mT, rank


def eigendecompose(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return eigenvalues (G, n), not negative, and eigenvectors (G, n, n), None for a diagonal."""
    if is_diagonal(factor):
        return factor.clamp(min=0), None
    eigenvalues, eigenvectors = torch.linalg.eigh(factor)
    return eigenvalues.clamp(min=0), eigenvectors
