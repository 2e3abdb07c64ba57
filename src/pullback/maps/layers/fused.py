"""Sums over the places of each sample in one pass over memory, where there are kernels for it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._core.compiled import kernels

_WIDEST = 8192  # entries of a line that one program holds
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def channel_sums(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor] | None:
    """Σδx and Σδ over the places of (N, C, *space), (N, C) each, or None where nothing is gained.

    Both lie row by row in memory, or both with the channels last.
    """
    work = kernels("sums", x.device) if _suitable(x, delta) else None
    if work is None:
        return None
    n, c = x.shape[:2]
    if x.is_contiguous() and delta.is_contiguous():
        found = work.row_sums(x.view(n * c, -1), delta.view(n * c, -1))
        return found[0].view(n, c), found[1].view(n, c)
    x, delta = x.movedim(1, -1), delta.movedim(1, -1)
    if c > _WIDEST or not (x.is_contiguous() and delta.is_contiguous()):
        return None
    found = work.column_sums(x.view(n, -1, c), delta.view(n, -1, c), centered=False, eps=None)
    return found[0], found[1]


def norm_sums(
    x: Tensor, delta: Tensor, eps: float, *, centered: bool
) -> tuple[Tensor, Tensor] | None:
    """Σ_t δx̂ and Σ_t δ of (N, T, U), (N, U) each: x̂ has square mean 1, and mean 0 if `centered`."""
    fit = x.shape[-1] <= _WIDEST and x.is_contiguous() and delta.is_contiguous()
    work = kernels("sums", x.device) if fit and _suitable(x, delta) else None
    if work is None:
        return None
    found = work.column_sums(x, delta, centered=centered, eps=eps)
    return found[0], found[1]


def _suitable(x: Tensor, delta: Tensor) -> bool:
    return x.is_cuda and x.dtype in _DTYPES and delta.dtype in _DTYPES and x.numel() > 0
