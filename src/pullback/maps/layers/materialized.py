"""The Gram of rows Σ_t δ_t ⊗ a_t from the rows themselves, a panel of them at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._core.products import add_cross

_CACHE = 2**22  # entries of rows held at once on a CPU


def add_materialized(
    out: Tensor, d1: Tensor, d2: Tensor, x: Tensor, y: Tensor, budget: int
) -> None:
    """out += Σ_tt' (a_t·a'_t') (δ_t·δ'_t') for cotangents (N, R, T, O) and inputs (N, T, I).

    `out` is (N·R, N'·R'). Panels of output features keep the rows within the budget. Where d2 is
    d1 so is y x, and half of the products is formed.
    """
    (n, r, _, o), (n2, r2, _, _), i = d1.shape, d2.shape, x.shape[-1]
    size = budget // (4 * x.element_size())
    size = min(size, _CACHE) if x.device.type == "cpu" else size
    panel = max(1, size // ((n * r + n2 * r2) * i))
    for a in range(0, o, panel):
        one = _rows(d1[..., a : a + panel], x)
        add_cross(out, one, one if d2 is d1 else _rows(d2[..., a : a + panel], y))


def _rows(delta: Tensor, inputs: Tensor) -> Tensor:
    """Σ_t δ_t ⊗ a_t as a matrix: (N, R, T, O), (N, T, I) -> (N·R, O·I)."""
    n, r, _, o = delta.shape
    left = delta.permute(0, 1, 3, 2).reshape(n, r * o, -1)
    return torch.bmm(left, inputs).view(n * r, o * inputs.shape[-1])
