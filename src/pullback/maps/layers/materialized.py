"""The Gram of rows Σ_t δ_t ⊗ a_t from the rows themselves, a panel of them at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._core.products import add_cross

_CACHE = 2**22  # entries of rows held at once on a CPU


def add_materialized(
    out: Tensor, d1: Tensor, d2: Tensor, x: Tensor, y: Tensor, budget: int
) -> None:
    """out += Σ_gtt' (a_t·a'_t') (δ_t·δ'_t') for cotangents (N, R, G, T, O), inputs (N, G, T, I).

    `out` is (N·R, N'·R'). Panels of groups or of output features keep the rows within the budget.
    Where d2 is d1 so is y x, and half of the products is formed.
    """
    (n, r, g, _, o), (n2, r2), i = d1.shape, d2.shape[:2], x.shape[-1]
    size, height = budget // (4 * x.element_size()), n * r + n2 * r2
    if x.device.type == "cpu":
        size = min(size, _CACHE)
    elif d2 is d1:
        height = n * r
    panel = max(1, size // (height * i))
    many = max(1, panel // o)  # groups at a time
    for b in range(0, g, many):
        groups = slice(b, b + many)
        for a in range(0, o, panel):
            some = (slice(None), slice(None), groups, slice(None), slice(a, a + panel))
            one = _rows(d1[some], x[:, groups])
            add_cross(out, one, one if d2 is d1 else _rows(d2[some], y[:, groups]))


def _rows(delta: Tensor, inputs: Tensor) -> Tensor:
    """Σ_t δ_t ⊗ a_t as a matrix: (N, R, G, T, O), (N, G, T, I) -> (N·R, G·O·I)."""
    n, r, g, t, o = delta.shape
    left = delta.permute(0, 2, 1, 4, 3).reshape(n * g, r * o, t)
    rows = torch.bmm(left, inputs.reshape(n * g, t, -1)).view(n, g, r, -1)
    return rows.transpose(1, 2).reshape(n * r, -1)
