r"""The direction of a step on a slice: the gradient in the metric of a tangent kernel.

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
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from ..chains import Layers
from .sweeps import find_norms


class SliceGradient(StrEnum):
    """The directions that have names."""

    RIEMANNIAN = "riemannian"
    GTK_ORTHONORMAL = "gtk-orthonormal"
    GTK_POLAR = "gtk-polar"


def find_direction(
    variant: str,
    components: Sequence[Layers],
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the direction of each parameter; what belongs to no layer keeps its gradient.

    Args:
        variant: one of `SliceGradient`.
        components: for each connected set of layers the names of each layer's parameters.
        params: w by name.
        gradients: g by name.
    """
    chains = tuple(_keep_names(layers, gradients) for layers in components)
    chains = tuple(layers for layers in chains if layers)
    if not chains:
        return dict(gradients)
    dtype = compute_dtype(params[chains[0][0][0]].dtype)
    direction = dict(gradients)
    if variant == SliceGradient.GTK_POLAR:
        for layers in chains:
            direction.update(_find_polar_direction(layers, params, gradients, dtype))
    else:
        is_mean = variant == SliceGradient.RIEMANNIAN
        direction.update(_find_radial_direction(is_mean, chains, params, gradients, dtype))
    return direction


def _keep_names(layers: Layers, names: Mapping[str, object]) -> Layers:
    """Return layers with only these names, without those that have none."""
    kept_layers = []
    for layer in layers:
        kept_names = tuple(name for name in layer if name in names)
        if kept_names:
            kept_layers.append(kept_names)
    return tuple(kept_layers)


def _list_names(layers: Layers) -> list[str]:
    return [name for layer in layers for name in layer]


def _find_radial_direction(
    is_mean: bool,
    chains: tuple[Layers, ...],
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return g_k + (mean ρ − ρ_k) ŵ_k, or with Σρ in place of the mean."""
    names = [name for layers in chains for name in _list_names(layers)]
    ws = [params[name].detach() for name in names]
    gs = [gradients[name].to(w.dtype) for name, w in zip(names, ws, strict=True)]
    squares = torch.stack(find_norms(ws)).square()
    dots = torch.stack([_dot(w, g, dtype) for w, g in zip(ws, gs, strict=True)])
    matrices = _make_radial_matrices(is_mean, chains, dtype, squares.device)
    inverse_norms = (matrices.membership @ squares).rsqrt().nan_to_num(posinf=0.0)
    rho = (matrices.membership @ dots) * inverse_norms
    layer_coefficients = ((matrices.along @ rho) * inverse_norms).nan_to_num(0.0, 0.0, 0.0)
    coefficients = matrices.membership.mT @ layer_coefficients
    direction = {}
    for name, w, g, coefficient in zip(names, ws, gs, coefficients, strict=True):
        direction[name] = torch.addcmul(g, w, coefficient.to(w.dtype))
    return direction


def _find_polar_direction(
    layers: Layers,
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the direction of the kernel of {r, ∂_ψ} for one chain, by name."""
    names = _list_names(layers)
    w = torch.cat([params[name].detach().to(dtype).reshape(-1) for name in names])
    g = torch.cat([gradients[name].to(dtype).reshape(-1) for name in names])
    layer_sizes = [sum(params[name].numel() for name in layer) for layer in layers]
    pieces = polar_direction(w, g, layer_sizes).split([params[name].numel() for name in names])
    direction = {}
    for name, piece in zip(names, pieces, strict=True):
        direction[name] = piece.view(params[name].shape).to(params[name].dtype)
    return direction


def _dot(w: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """⟨w, g⟩, added up in this dtype."""
    return torch.dot(w.reshape(-1).to(dtype), g.reshape(-1).to(dtype))


@dataclass(frozen=True)
class _RadialMatrices:
    """Matrices of the radial part of a direction.

    Attributes:
        membership: (layers, parameters) with 1 where a parameter belongs to a layer.
        along: (layers, layers), ρ ↦ what is added along each ŵ: mean ρ − ρ_k, or Σρ − ρ_k.
    """

    membership: Tensor
    along: Tensor


@lru_cache(maxsize=64)
def _make_radial_matrices(
    is_mean: bool, chains: tuple[Layers, ...], dtype: torch.dtype, device: torch.device
) -> _RadialMatrices:
    """Return matrices, which are cached since building them copies numbers from the host."""
    rows = []
    blocks = []
    for layers in chains:
        rows.extend(torch.ones(1, len(layer), dtype=dtype) for layer in layers)
        entry = 1 / len(layers) if is_mean else 1.0
        blocks.append(torch.full((len(layers), len(layers)), entry, dtype=dtype))
    along = torch.block_diag(*blocks) - torch.eye(len(rows), dtype=dtype)
    return _RadialMatrices(torch.block_diag(*rows).to(device), along.to(device))


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
    layer_sizes = list(sizes)
    squares = w * w
    dots = w * g
    for products in (squares, dots):
        for piece in products.split(layer_sizes):
            piece.cumsum_(0)
    last = [end - 1 for end in accumulate(layer_sizes)]
    inverse_norms = torch.stack([squares[i] for i in last]).rsqrt().nan_to_num(posinf=0.0)
    radial = (torch.stack([dots[i] for i in last]) * inverse_norms).sum()
    # A gradient that is not finite would spread from one layer to the others.
    radial_coefficients = (radial * inverse_norms).nan_to_num(0.0, 0.0, 0.0)
    h = (squares * g).addcmul_(w, dots, value=-1)
    terms = torch.mul(h, w, out=dots)
    terms[1:].div_(squares[:-1])
    # Entries before the first one that is not zero have a tangent without a direction: it is 0.
    terms.nan_to_num_(0.0, 0.0, 0.0)
    for piece, coefficient in zip(terms.split(layer_sizes), radial_coefficients, strict=True):
        piece[:1].zero_()  # a layer's first entry has no angle, and h is 0 there to round-off
        piece.cumsum_(0)
        piece.sub_(piece[-1] - coefficient)
    return h.addcmul_(w, terms)
