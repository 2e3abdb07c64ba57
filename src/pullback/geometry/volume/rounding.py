"""Coordinates in which a sublevel set is about as long along every axis."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .landscape import Landscape

_TURNS = 12  # at most; each may find the set some ten times as long
_ROUND = 8  # longest over shortest reach that needs no further turn


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

    Where the curvature says little of the set (kinks, quartic minima), directions are tried, and
    the axes turned to where they reach furthest. None where it reaches without end along an axis.
    """
    axes = _axes(landscape)
    reach = _reach(landscape, axes.T, epsilon, refuse=True)
    if not bool(reach.isfinite().all()):
        return None
    found = Rounded(landscape, axes * reach)
    for turn in range(_TURNS):
        map = _turned(found, epsilon, torch.Generator().manual_seed(turn))
        new = None if map is None else Rounded(landscape, map)
        if new is None or new.log_unit <= found.log_unit:  # as where the minimum lies off center
            break
        found = new
    return found


def _turned(around: Rounded, epsilon: float, generator: torch.Generator) -> Tensor | None:
    """Columns along the axes of Σ xxᵀ over ends x of the set; None where these are round already.

    Or where the set has no end.
    """
    k, map = around.dimension, around.map
    drawn = torch.randn(max(128, 4 * k), k, dtype=torch.float64, generator=generator).to(map)
    directions = drawn / drawn.norm(dim=1, keepdim=True)
    reach = _reach(around, directions, epsilon)
    if not bool(reach.isfinite().all() & (reach.max() > _ROUND * reach.min())):
        return None
    ends = directions * (reach / reach.max())[:, None]
    axes = torch.linalg.eigh(ends.T @ ends)[1]
    lengths = _reach(around, axes.T, epsilon)
    return map @ (axes * lengths) if bool(lengths.isfinite().all()) else None


def _reach(
    landscape: Landscape | Rounded, directions: Tensor, epsilon: float, *, refuse: bool = False
) -> Tensor:
    """How far the set goes along lines (m, k), by doubling: the geometric mean of both ways."""
    lengths = 2.0 ** torch.arange(-60, 61, dtype=torch.float64, device=directions.device)
    both = torch.stack([directions, -directions])
    points = lengths[:, None, None, None] * both
    heights = landscape.height(points.flatten(0, 2)).view(points.shape[:3])
    above = heights >= epsilon
    if refuse:
        assert isinstance(landscape, Landscape)
        landscape.refuse_lower(heights[above.int().cumsum(0) == 0], epsilon)
    ends = lengths[above.int().argmax(0)].where(above.any(0), torch.inf)
    return ends.log2().mean(0).exp2()


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
