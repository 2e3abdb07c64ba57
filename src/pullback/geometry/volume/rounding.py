"""Coordinates in which a sublevel set is about as long along every axis."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .landscape import Landscape


class Rounded:
    """A landscape over u, θ = Tu with T = `map` (k, k).

    A long and thin set across the parameters' own axes would fall through any grid of them, and
    chains would hardly move along it.
    """

    def __init__(self, landscape: Landscape, map: Tensor) -> None:
        self.landscape, self.map = landscape, map
        self.dimension = landscape.dimension
        #: log |det T|, of the Euclidean volume in θ of a unit cube in u
        self.log_unit = float(torch.linalg.slogdet(map)[1])

    def height(self, u: Tensor) -> Tensor:
        """F − F(w₀) at u (n, k)."""
        return self.landscape.height(u @ self.map.T)

    def density(self, u: Tensor) -> Tensor:
        """√det((JB)ᵀ M (JB)) at u (n, k), per volume in θ."""
        return self.landscape.density(u @ self.map.T)


def rounded(landscape: Landscape, epsilon: float) -> Rounded | None:
    """Along the axes of the loss's curvature, each as long as the set reaches along it.

    None where it reaches without end.
    """
    axes = _axes(landscape)
    lengths = 2.0 ** torch.arange(-60, 61, dtype=torch.float64, device=axes.device)
    reach = []
    for axis in axes.T:
        both = lengths[:, None, None] * torch.stack([axis, -axis])
        heights = landscape.height(both.flatten(0, 1)).view(-1, 2)
        above = heights >= epsilon
        first = above.int().argmax(0)
        landscape.refuse_lower(heights[above.int().cumsum(0) == 0], epsilon)
        if not bool(above.any(0).all()):
            return None
        reach.append(lengths[first].log2().mean().exp2())
    return Rounded(landscape, axes * torch.stack(reach))


def _axes(landscape: Landscape) -> Tensor:
    """Eigenvectors of the Hessian as columns; the parameters' own axes where there is none."""
    own = torch.eye(landscape.dimension, dtype=torch.float64, device=landscape.basis.device)
    try:
        curvature = landscape.curvature()
    except (PullbackError, torch.OutOfMemoryError):
        raise
    except RuntimeError:  # an operation without second derivatives
        return own
    if not bool(torch.isfinite(curvature).all()):
        return own
    return torch.linalg.eigh((curvature + curvature.T) / 2)[1]
