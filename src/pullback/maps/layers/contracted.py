r"""The Gram of rows Σ_t δ_t ⊗ a_t when few places meet many covectors.

A pair of samples shares its weights w_tt' = a_t·a'_t' among all R·R' pairs of covectors, so they
are multiplied into one side's cotangents first:

    p_r't = Σ_t' w_tt' δ'_r't',        K_rr' = Σ_t δ_rt · p_r't

T²·O·R' + T·O·R·R' operations a pair, where the Hadamard product of Grams takes T²·O·R·R' and
materialized rows O·I·R·R'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .hadamard import Weights

_CACHE = 2**20  # entries of p held at once on a CPU


def contracted(d1: Tensor, d2: Tensor, weights: Weights, budget: int) -> Tensor:
    """Σ_tt' w_tt' (δ_t·δ'_t') for cotangents (N, R, T, O): (N·R, N'·R').

    `weights` gives a_t·a'_t' as (n, T, n', T') for slices of samples. Where d2 is d1 each pair of
    samples is met once.
    """
    (n, r, t, o), (n2, r2, t2, _) = d1.shape, d2.shape
    symmetric = d2 is d1
    left = d1.reshape(n, r, t * o)
    right = d2.permute(0, 2, 3, 1).reshape(n2, t2, o * r2)
    out = d1.new_empty(n, r, n2, r2)
    size = budget // (4 * d1.element_size())
    panel = max(1, (min(size, _CACHE) if d1.device.type == "cpu" else size) // (t * o * r2))
    for j in range(n2):
        for a in range(j if symmetric else 0, n, panel):
            b = min(a + panel, n)
            w = weights(slice(a, b), slice(j, j + 1)).reshape((b - a) * t, t2)
            p = (w @ right[j]).view(b - a, t * o, r2)
            out[a:b, :, j] = torch.bmm(left[a:b], p)
        if symmetric:
            out[j, :, j] = (out[j, :, j] + out[j, :, j].T) / 2
            out[j, :, j + 1 :] = out[j + 1 :, :, j].permute(2, 0, 1)
    return out.view(n * r, n2 * r2)
