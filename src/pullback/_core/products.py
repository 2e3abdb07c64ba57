"""Symmetric products X Xᵀ near the arithmetic floor, at full working precision."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

_SPLIT_ABOVE = 2**31  # flops from which three tensor-core products beat one float32 product


def _on_tensor_cores(x: Tensor, flops: int) -> bool:
    return (
        x.is_cuda
        and x.dtype == torch.float32
        and flops >= _SPLIT_ABOVE
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = high + low with `high` exact in TF32 (10 mantissa bits), by masking the tail."""
    high = (x.view(torch.int32) & -8192).view(torch.float32)
    return high, x - high


def matmul_nt(x: Tensor, y: Tensor) -> Tensor:
    """X Yᵀ for (n, d) and (m, d).

    Large float32 products on a GPU run as three TF32 products of the split operands
    (high·high + high·low + low·high), which keeps float32 accuracy at tensor-core speed.
    """
    if not _on_tensor_cores(x, 2 * x.shape[0] * y.shape[0] * x.shape[1]):
        return x @ y.T
    (xh, xl), (yh, yl) = _split(x.contiguous()), _split(y.contiguous())
    with _tf32():
        return torch.addmm(torch.addmm(xh @ yl.T, xl, yh.T), xh, yh.T)


def gram(x: Tensor, panels: int = 4) -> Tensor:
    """X Xᵀ for (n, d): only the panels on and below the diagonal are multiplied."""
    n = x.shape[0]
    if n * n * x.shape[1] < 2**27:
        return x @ x.T
    out = x.new_empty(n, n)
    edges = [n * i // panels for i in range(panels + 1)]
    for a, b in pairwise(edges):
        out[a:b, :b] = matmul_nt(x[a:b], x[:b])
        out[:a, a:b] = out[a:b, :a].T
    return out


def cross(x: Tensor, y: Tensor) -> Tensor:
    """X Yᵀ, using the symmetry where y is x."""
    return gram(x) if y is x else matmul_nt(x, y)
