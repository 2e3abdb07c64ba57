r"""What a step follows on a slice: the gradient in the metric of a tangent kernel.

Layers (A_k, b_k) of a chain are vectors w_k; with ŵ_k = w_k/|w_k|, ρ_k = ⟨ŵ_k, g_k⟩ and
r = (ŵ_1, …, ŵ_ℓ):

    riemannian        g_k + (mean ρ − ρ_k) ŵ_k       the projection of g onto the slice of equal
                                                     norms; the kernel of {r/√ℓ, unit ∂_ψ}
    gtk-orthonormal   g_k + (Σρ − ρ_k) ŵ_k           the kernel of {r, unit ∂_ψ}: the radial part
                                                     is ℓ times as long
    gtk-polar         (Σρ) ŵ_k + Σ_l⟨g_k, ∂_{ψ^l}⟩∂_{ψ^l}     the kernel of {r, ∂_ψ} as they are

The first two are g + c_k w, with c from the norms |w| and products ⟨w, g⟩ of each parameter.

Polar coordinates (r, ψ^1, …, ψ^{n−1}) of w ∈ Rⁿ have tangents with |∂_r| = 1 and
|∂_{ψ^l}| = a_{l+1}, the norm of the first l + 1 entries:

    ∂_{ψ^l} = (w_1, …, w_l)·w_{l+1}/a_l − a_l e_{l+1},    a_l = √(w_1² + … + w_l²).

They depend on the order of the entries, and so does what is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from .keeper import norms_of

GRADIENTS = ("riemannian", "gtk-orthonormal", "gtk-polar")

#: for each connected set of layers the names of each layer's parameters
Layers = tuple[tuple[tuple[str, ...], ...], ...]


def direction(
    kind: str,
    layers: Sequence[Sequence[Sequence[str]]],
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The direction of each parameter; what belongs to no layer keeps its gradient.

    Args:
        kind: one of `GRADIENTS`.
        layers: for each connected set of layers the names of each layer's parameters.
        params: w by name.
        gradients: g by name.
    """
    found = ([tuple(n for n in names if n in gradients) for names in chain] for chain in layers)
    held = tuple(tuple(names for names in chain if names) for chain in found)
    flat = [n for chain in held for names in chain for n in names]
    if not flat:
        return dict(gradients)
    dtype = compute_dtype(params[flat[0]].dtype)
    if kind == "gtk-polar":
        moved = [_polar(chain, params, gradients, dtype) for chain in held if chain]
        return {**gradients, **{n: x for each in moved for n, x in each.items()}}
    ws = [params[n].detach() for n in flat]
    gs = [gradients[n].to(w.dtype) for n, w in zip(flat, ws, strict=True)]
    squares = torch.stack(norms_of(ws)).square()
    dots = torch.stack([_dot(w, g, dtype) for w, g in zip(ws, gs, strict=True)])
    owner, along = _radial(kind, held, dtype, squares.device)
    inverse = (owner @ squares).rsqrt().nan_to_num(posinf=0.0)
    rho = (owner @ dots) * inverse
    pull = owner.mT @ ((along @ rho) * inverse).nan_to_num(0.0, 0.0, 0.0)
    moves = zip(flat, ws, gs, pull, strict=True)
    return {**gradients, **{n: torch.addcmul(g, w, c.to(w.dtype)) for n, w, g, c in moves}}


def _polar(
    blocks: Sequence[Sequence[str]],
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    flat = [n for names in blocks for n in names]
    w = torch.cat([params[n].detach().to(dtype).reshape(-1) for n in flat])
    g = torch.cat([gradients[n].to(dtype).reshape(-1) for n in flat])
    sizes = [sum(params[n].numel() for n in names) for names in blocks]
    moved = polar_direction(w, g, sizes).split([params[n].numel() for n in flat])
    return {
        n: m.view(params[n].shape).to(params[n].dtype) for n, m in zip(flat, moved, strict=True)
    }


def _dot(w: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """⟨w, g⟩, added up in this dtype."""
    return torch.dot(w.reshape(-1).to(dtype), g.reshape(-1).to(dtype))


@lru_cache(maxsize=64)
def _radial(
    kind: str, layers: Layers, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Matrices that are kept, since building them copies numbers from the host.

    Returns:
        (layers, parameters) with 1 where a parameter belongs to a layer, and
        ρ ↦ what is added along each ŵ, (layers, layers): mean ρ − ρ_k, or Σρ − ρ_k.
    """
    sizes = [[len(names) for names in chain] for chain in layers if chain]
    rows = [torch.ones(1, n, dtype=dtype) for chain in sizes for n in chain]
    mean = kind == "riemannian"
    ones = [torch.full((n, n), 1 / n if mean else 1.0, dtype=dtype) for n in map(len, sizes)]
    along = torch.block_diag(*ones) - torch.eye(len(rows), dtype=dtype)
    return torch.block_diag(*rows).to(device), along.to(device)


def polar_direction(w: Tensor, g: Tensor, sizes: Sequence[int]) -> Tensor:
    r"""The kernel of {r, ∂_ψ} for flat layers one after the other, (Σ sizes,), without the basis.

    It is (Σρ) ŵ_k and Σ_l ⟨g, ∂_{ψ^l}⟩ ∂_{ψ^l} in each layer k, with ρ_k = ⟨ŵ_k, g_k⟩. Of the
    latter, with A = cumsum(w²), s = cumsum(w g) and h = A g − w s = −⟨g, ∂_{ψ^{k−1}}⟩ a_{k−1},

        out_k = h_k − w_k Σ_{j>k} h_j w_j/A_{j−1}.

    Entries are worked on all at once, and only running sums are taken layer by layer.

    >>> import torch
    >>> w, g = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 0.0, -1.0])
    >>> polar_direction(w, g, [3]) - (w @ g) / (w @ w) * w  # without the radius
    tensor([ 6.8000,  3.6000, -7.0000])
    """
    squares, dots = w * w, w * g
    for each in (squares, dots):
        for piece in each.split(list(sizes)):
            piece.cumsum_(0)
    last = [end - 1 for end in accumulate(sizes)]
    inverse = torch.stack([squares[i] for i in last]).rsqrt().nan_to_num(posinf=0.0)
    radial = (torch.stack([dots[i] for i in last]) * inverse).sum()
    # a gradient that is not finite would spread from one layer to the others
    pull = (radial * inverse).nan_to_num(0.0, 0.0, 0.0)
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
