r"""What a step follows on a slice: the gradient in the metric of a tangent kernel.

Layers (A_k, b_k) of a chain are vectors w_k; with ŵ_k = w_k/|w_k|, ρ_k = ⟨ŵ_k, g_k⟩ and
r = (ŵ_1, …, ŵ_ℓ):

    riemannian        g_k + (mean ρ − ρ_k) ŵ_k       the projection of g onto the slice of equal
                                                     norms; the kernel of {r/√ℓ, unit ∂_ψ}
    gtk-orthonormal   g_k + (Σρ − ρ_k) ŵ_k           the kernel of {r, unit ∂_ψ}: the radial part
                                                     is ℓ times as long
    gtk-polar         (Σρ) ŵ_k + Σ_l⟨g_k, ∂_{ψ^l}⟩∂_{ψ^l}     the kernel of {r, ∂_ψ} as they are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from ..slices.polar import polar_direction

GRADIENTS = ("riemannian", "gtk-orthonormal", "gtk-polar")


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
    out = dict(gradients)
    for blocks in layers:
        held = [[n for n in names if n in gradients] for names in blocks]
        held = [names for names in held if names]
        if held:
            out.update(_directed(kind, held, params, gradients))
    return out


def _directed(
    kind: str,
    blocks: Sequence[Sequence[str]],
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    flat = [n for names in blocks for n in names]
    dtype = compute_dtype(params[flat[0]].dtype)
    if kind == "gtk-polar":
        return _polar(blocks, params, gradients, dtype)
    ws = [params[n].detach() for n in flat]
    gs = [gradients[n].to(w.dtype) for n, w in zip(flat, ws, strict=True)]
    norms = torch.stack(torch._foreach_norm(ws, 2, dtype)).square()
    dots = torch.stack([dot(w, g, dtype) for w, g in zip(ws, gs, strict=True)])
    owner = owners(tuple(map(tuple, blocks)), tuple(flat), dtype, norms.device)
    sizes = (owner @ norms).sqrt()
    inverse = torch.where(sizes > 0, 1 / sizes, 0.0)
    rho = (owner @ dots) * inverse
    radial = rho.mean() if kind == "riemannian" else rho.sum()
    pull = owner.mT @ finite((radial - rho) * inverse)
    return {
        n: torch.addcmul(g, w, c.to(w.dtype)) for n, w, g, c in zip(flat, ws, gs, pull, strict=True)
    }


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


def finite(x: Tensor) -> Tensor:
    """X, or 0 where a gradient that is not finite would spread from one layer to the others."""
    return torch.where(torch.isfinite(x), x, 0.0)


def dot(w: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """⟨w, g⟩, added up in this dtype."""
    return torch.dot(w.reshape(-1).to(dtype), g.reshape(-1).to(dtype))


@lru_cache(maxsize=64)
def owners(
    blocks: tuple[tuple[str, ...], ...],
    names: tuple[str, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """(blocks, names): 1 where a parameter belongs to a block; made once, since hosts are slow."""
    return torch.tensor(
        [[float(n in block) for n in names] for block in blocks], dtype=dtype, device=device
    )
