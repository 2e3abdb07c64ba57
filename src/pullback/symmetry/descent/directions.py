r"""What a step follows on a slice: the gradient in the metric of a tangent kernel.

Layers (A_k, b_k) of a chain are vectors w_k; with ŵ_k = w_k/|w_k|, ρ_k = ⟨ŵ_k, g_k⟩ and
r = (ŵ_1, …, ŵ_ℓ):

    riemannian        g_k + (mean ρ − ρ_k) ŵ_k       the projection of g onto the slice of equal
                                                     norms; the kernel of {r/√ℓ, unit ∂_ψ}
    gtk-orthonormal   g_k + (Σρ − ρ_k) ŵ_k           the kernel of {r, unit ∂_ψ}: the radial part
                                                     is ℓ times as long
    gtk-polar         (Σρ) ŵ_k + Σ_l⟨g_k, ∂_{ψ^l}⟩∂_{ψ^l}     the kernel of {r, ∂_ψ} as they are

The first two are g + c_k w, with c from the norms |w| and products ⟨w, g⟩ of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from ..slices.polar import polar_direction
from .sweep import norms_of

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
    pull = _radial(held, tuple(flat), dtype, squares.device).pull(kind, squares, dots)
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


class _Radial:
    """The radial parts of layers: (layers, names) is 1 where a parameter belongs to a layer."""

    def __init__(
        self, layers: Layers, names: tuple[str, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        blocks = [names for chain in layers for names in chain]
        owned = [[float(n in block) for n in names] for block in blocks]
        self._owner = torch.tensor(owned, dtype=dtype, device=device)
        ones = [self._owner.new_ones(len(chain), len(chain)) for chain in layers if chain]
        eye = torch.eye(len(blocks), dtype=dtype, device=device)
        # ρ ↦ what is added along each ŵ: mean ρ − ρ_k, or Σρ − ρ_k
        self._along = {
            "riemannian": torch.block_diag(*(x / len(x) for x in ones)) - eye,
            "gtk-orthonormal": torch.block_diag(*ones) - eye,
        }

    def pull(self, kind: str, q: Tensor, d: Tensor) -> Tensor:
        """c of each parameter's layer, (P,); 0 where that is zero or not finite."""
        inverse = (self._owner @ q).rsqrt().nan_to_num(posinf=0.0)
        rho = (self._owner @ d) * inverse
        return self._owner.mT @ ((self._along[kind] @ rho) * inverse).nan_to_num(0.0, 0.0, 0.0)


@lru_cache(maxsize=64)
def _radial(
    layers: Layers, names: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> _Radial:
    """Return a cached `_Radial`: building one copies numbers from the host."""
    return _Radial(layers, names, dtype, device)
