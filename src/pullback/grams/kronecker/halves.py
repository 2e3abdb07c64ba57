r"""Cholesky factors of large matrices by halves, that is mostly by products: S = LLᵀ,

    L₁₁L₁₁ᵀ = S₁₁,   L₂₁ = S₂₁L₁₁⁻ᵀ,   L₂₂L₂₂ᵀ = S₂₂ − L₂₁L₂₁ᵀ,

and the halves by halves again. MKL's LAPACK alone is slower on one CPU thread: its rate is a
fraction of that of products, and torch hands it a triangle entry by entry, down columns that share
a few lines of the cache where n is round. OpenBLAS divides by itself, and is faster alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_PAYS = torch.backends.mkl.is_available()
_LARGE = 448  # from this size on it does
_LEAF = 320  # up to this size LAPACK does it
_WIDE = 16  # halves are whole vector registers
_STRIP = 128  # columns of L₂₁L₂₁ᵀ, of which only what stands below the diagonal is needed


def pays(side: Tensor) -> bool:
    """Whether halves are faster than one factorization."""
    return _PAYS and side.device.type == "cpu" and side.shape[-1] >= _LARGE


def factorized(held: Tensor) -> tuple[Tensor, Tensor]:
    """L in the memory of symmetric (G, n, n), column by column, and what LAPACK tells, (G,)."""
    lower = held.mT
    return lower, _factorize(lower)[1]


def _factorize(held: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with the factor where it is at hand in order."""
    n = held.shape[-1]
    if n <= _LEAF:
        lower, info = torch.linalg.cholesky_ex(held)
        held.copy_(lower)
        return lower, info
    half = _half(n)
    first, one = _factorize(held[:, :half, :half])
    below = held[:, half:, :half]
    below.copy_(torch.linalg.solve_triangular(first.mT, below, upper=True, left=False))
    held[:, :half, half:] = 0
    rest, last = n - half, held[:, half:, half:]
    for a, b in _strips(rest):
        last[:, a:, a:b].baddbmm_(below[:, a:], below[:, a:b].mT, alpha=-1)
    two = _factorize(last)[1]
    return held, torch.maximum(one, two)


def _half(n: int) -> int:
    """About n/2, such that neither part has columns that fall on few lines of the cache."""
    half = _WIDE * round(n / (2 * _WIDE))
    while half > _WIDE and (half % (4 * _WIDE) == 0 or (n - half) % (4 * _WIDE) == 0):
        half -= _WIDE
    return half


def _strips(n: int) -> list[tuple[int, int]]:
    """Bounds of the columns, whole vector registers apart."""
    count = max(1, n // _STRIP)
    return list(pairwise([*(_WIDE * round(n * i / (count * _WIDE)) for i in range(count)), n]))
