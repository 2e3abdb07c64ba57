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


def add_contracted(out: Tensor, d1: Tensor, d2: Tensor, weights: Weights, budget: int) -> None:
    """out += Σ_tt' w_tt' (δ_t·δ'_t') for cotangents (N, R, T, O) and `out` (N·R, N'·R').

    `weights` gives a_t·a'_t' as (n, T, n', T') for slices of samples. Where d2 is d1 each pair of
    samples is met once.
    """
    (n, r, t, o), (n2, r2, t2, _) = d1.shape, d2.shape
    left = d1.reshape(n, r, t * o)
    right = d2.permute(0, 2, 3, 1).reshape(n2, t2, o * r2)
    target = out.view(n, r, n2, r2)
    size = budget // (4 * d1.element_size())
    size = (min(size, _CACHE) if d1.device.type == "cpu" else size) // (t * o * r2)
    high = min(n, max(1, size))
    wide = max(1, size // high)
    for j in range(0, n2, wide):
        k = min(j + wide, n2)
        for a in range(j if d2 is d1 else 0, n, high):
            b = min(a + high, n)
            w = weights(slice(a, b), slice(j, k)).permute(2, 0, 1, 3).reshape(k - j, -1, t2)
            p = torch.bmm(w, right[j:k]).view(k - j, b - a, t * o, r2)
            target[a:b, :, j:k] += (left[a:b] @ p).permute(1, 2, 0, 3)
