r"""The tangent kernel of polar coordinates, in O(n).

Polar coordinates (r, ψ^1, …, ψ^{n−1}) of w ∈ Rⁿ have tangents with |∂_r| = 1 and
|∂_{ψ^l}| = a_{l+1}, the norm of the first l + 1 entries:

    ∂_{ψ^l} = (w_1, …, w_l)·w_{l+1}/a_l − a_l e_{l+1},    a_l = √(w_1² + … + w_l²).

They depend on the order of the entries, and so does what is made of them.
"""

from __future__ import annotations

from torch import Tensor


def polar_tangential(w: Tensor, g: Tensor) -> Tensor:
    r"""Σ_l ⟨g, ∂_{ψ^l}⟩ ∂_{ψ^l} for flat w and g (n,), without the basis.

    With s = cumsum(w g) and d_l = w_{l+1} s_l/a_l − a_l g_{l+1} = ⟨g, ∂_{ψ^l}⟩,

        out_k = w_k Σ_{l≥k} d_l w_{l+1}/a_l − d_{k−1} a_{k−1}.

    >>> import torch
    >>> w, g = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 0.0, -1.0])
    >>> polar_tangential(w, g)
    tensor([ 6.8000,  3.6000, -7.0000])
    """
    out = g.new_zeros(g.shape)
    if w.numel() < 2:
        return out
    a = w.square().cumsum(0)[:-1].sqrt()
    s = (w * g).cumsum(0)[:-1]
    # the tangent of entries before the first that is not zero has no direction: none is taken
    slope = (w[1:] / a).where(a > 0, 0.0)
    d = slope * s - a * g[1:]
    tail = (d * slope).flip(0).cumsum(0).flip(0)
    out[:-1] = w[:-1] * tail
    out[1:] -= d * a
    return out


def polar_basis(w: Tensor) -> Tensor:
    """The tangents ∂_{ψ^l}, (n − 1, n)."""
    n = w.numel()
    a = w.square().cumsum(0)[:-1].sqrt()
    slope = (w[1:] / a).where(a > 0, 0.0)
    basis = (slope[:, None] * w).tril()[:, :n]
    basis[range(n - 1), range(1, n)] = -a
    return basis
