r"""The tangent kernel of polar coordinates, in O(n).

Polar coordinates (r, ψ^1, …, ψ^{n−1}) of w ∈ Rⁿ have tangents with |∂_r| = 1 and
|∂_{ψ^l}| = a_{l+1}, the norm of the first l + 1 entries:

    ∂_{ψ^l} = (w_1, …, w_l)·w_{l+1}/a_l − a_l e_{l+1},    a_l = √(w_1² + … + w_l²).

They depend on the order of the entries, and so does what is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.space import ParameterSpace
from .equal_norm import EqualNorm


def polar_tangential(w: Tensor, g: Tensor) -> Tensor:
    r"""Σ_l ⟨g, ∂_{ψ^l}⟩ ∂_{ψ^l} for flat w and g (n,), without the basis.

    With A = cumsum(w²), s = cumsum(w g) and h = A g − w s = −⟨g, ∂_{ψ^{k−1}}⟩ a_{k−1},

        out_k = h_k − w_k Σ_{j>k} h_j w_j/A_{j−1}.

    >>> import torch
    >>> w, g = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 0.0, -1.0])
    >>> polar_tangential(w, g)
    tensor([ 6.8000,  3.6000, -7.0000])
    """
    sizes = [w.numel()]
    return _tangential(w, g, *_sums(w, g, sizes), sizes, w.new_zeros(1))


def polar_direction(w: Tensor, g: Tensor, sizes: Sequence[int]) -> Tensor:
    r"""The kernel of {r, ∂_ψ} for flat layers one after the other, (Σ sizes,).

    It is (Σρ) ŵ_k and the above in each layer k, with ρ_k = ⟨ŵ_k, g_k⟩. Entries are worked on all
    at once, and only running sums are taken layer by layer.
    """
    squares, dots = _sums(w, g, sizes)
    last = [end - 1 for end in accumulate(sizes)]
    inverse = torch.stack([squares[i] for i in last]).rsqrt().nan_to_num(posinf=0.0)
    radial = (torch.stack([dots[i] for i in last]) * inverse).sum()
    # a gradient that is not finite would spread from one layer to the others
    pull = (radial * inverse).nan_to_num(0.0, 0.0, 0.0)
    return _tangential(w, g, squares, dots, sizes, pull)


def _sums(w: Tensor, g: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """cumsum(w²) and cumsum(w g), anew in each layer."""
    found = (w * w, w * g)
    for each in found:
        for piece in each.split(list(sizes)):
            piece.cumsum_(0)
    return found


def _tangential(
    w: Tensor, g: Tensor, squares: Tensor, dots: Tensor, sizes: Sequence[int], pull: Tensor
) -> Tensor:
    """The tangential part of each layer plus pull·w."""
    out = (squares * g).addcmul_(w, dots, value=-1)
    terms = torch.mul(out, w, out=dots)
    terms[1:].div_(squares[:-1])
    # the tangent of entries before the first that is not zero has no direction: none is taken
    terms.nan_to_num_(0.0, 0.0, 0.0)
    for piece, c in zip(terms.split(list(sizes)), pull, strict=True):
        piece[:1].zero_()  # a layer's first entry has no angle, and h is 0 there to round-off
        piece.cumsum_(0)
        piece.sub_(piece[-1] - c)
    return out.addcmul_(w, terms)


def polar_basis(w: Tensor) -> Tensor:
    """The tangents ∂_{ψ^l}, (n − 1, n)."""
    n = w.numel()
    a = w.square().cumsum(0)[:-1].sqrt()
    slope = (w[1:] / a).where(a > 0, 0.0)
    basis = (slope[:, None] * w).tril()[:, :n]
    basis[range(n - 1), range(1, n)] = -a
    return basis


def polar_tangents(slice: EqualNorm) -> tuple[Tensor, Tensor]:
    r"""The paper's basis of T_wS, rows C (p − k, p), and the diagonal of h = C Cᵀ.

    It is r = Σ_k ŵ_k and the ∂_{ψ_k^l} of each layer, with h = diag(ℓ, w_1² + … + w_{l+1}²).

    For small models, at a point of the slice. Parameters in no layer have their own coordinates.
    """
    if not slice.biases:
        raise PullbackError(
            "The basis is that of layers with their biases",
            "this slice counts weights only",
            "Use EqualNorm(..., biases=True), or tangent_basis()",
        )
    space = ParameterSpace({n: w for n, w in slice.params.items() if w.requires_grad})
    index = space.index()
    left = torch.ones(space.size, dtype=torch.bool, device=space.device)
    rows = []
    for links in slice.chains:
        radial = space.zeros(space.size)
        for names in links.layers:
            place = torch.cat(
                [torch.arange(index[n].start, index[n].stop, device=space.device) for n in names]
            )
            w = torch.cat([slice.params[n].detach().to(space.dtype).flatten() for n in names])
            left[place] = False
            radial[place] = w / w.norm()
            tangents = space.zeros(len(place) - 1, space.size)
            tangents[:, place] = polar_basis(w)
            rows.append(tangents)
        rows.append(radial[None])
    rows.append(torch.eye(space.size, dtype=space.dtype, device=space.device)[left])
    basis = torch.cat(rows)
    return basis, basis.square().sum(1)
