r"""The paper's basis of the tangent space of equal norms, and its metric h.

r = Σ_k ŵ_k  and  ∂_{ψ_k^l} of the polar coordinates of each layer,
h = diag(ℓ, |∂_{ψ_k^l}|²),  |∂_{ψ_k^l}|² = w_1² + … + w_{l+1}² within the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.space import ParameterSpace
from .layer_slice import EqualNorm
from .polar import polar_basis


def polar_tangents(slice: EqualNorm) -> tuple[Tensor, Tensor]:
    """Rows C (p − k, p) that span T_wS, and the diagonal of h = C Cᵀ; for small models.

    Parameters that are in no layer have their own coordinates. The point must lie on the slice.
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
        for block in links.blocks:
            place = torch.cat([_range(index[n], space.device) for n in block.names])
            w = torch.cat([slice.params[n].detach().to(space.dtype).flatten() for n in block.names])
            left[place] = False
            radial[place] = w / w.norm()
            tangents = space.zeros(len(place) - 1, space.size)
            tangents[:, place] = polar_basis(w)
            rows.append(tangents)
        rows.append(radial[None])
    rows.append(torch.eye(space.size, dtype=space.dtype, device=space.device)[left])
    basis = torch.cat(rows)
    return basis, basis.square().sum(1)


def _range(found: Any, device: torch.device) -> Tensor:
    return torch.arange(found.start, found.stop, device=device)
