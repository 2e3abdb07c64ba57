"""ε-flatness: how much room a minimum has, measured in function space on a grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import scipy
import torch
from torch import Tensor

from ..._core.checks import require_number
from ..._core.errors import PullbackError
from ..local.ambient import MetricLike, Parametrization, Phi, Vector
from .landscape import Landscape, round_landscape

#: points per axis of the last grid, by dimension
_RESOLUTION = {1: 4001, 2: 401, 3: 81}
_COARSE = {1: 401, 2: 101, 3: 31}
#: the set is unbounded where it goes on beyond this
_FAR = 1e6
_GROWTH = 1.7


@dataclass(frozen=True)
class Flatness:
    """The room around a minimum.

    Attributes:
        volume: ∫_S √det G dw in the pulled-back metric: the volume of φ(S) where φ is injective.
        error: of the volume: its change from half the resolution.
        euclidean: ∫_S dw, which depends on the coordinates.
        bounded: whether the set was seen to end; an unbounded one has infinite volumes.
        rank: of dφ at the minimum.
        dimension: of the set that was measured.
        evaluations: of the loss.
    """

    volume: float
    error: float
    euclidean: float
    bounded: bool
    rank: int
    dimension: int
    evaluations: int

    def __float__(self) -> float:
        return self.volume


def flatness(
    phi: Phi,
    loss: Callable[[Tensor], Tensor],
    minimum: Vector | None = None,
    *,
    epsilon: float,
    inputs: object = None,
    metric: MetricLike = None,
    reduction: str | None = None,
    basis: Tensor | str | None = None,
    tolerance: float = 1e-8,
) -> Flatness:
    r"""∫_S dvol over the connected S ∋ w₀ with F(w₀) ≤ F < F(w₀) + ε, F = loss∘φ.

    The volume element is √det(JᵀMJ), so the number belongs to the functions and not to their
    coordinates: no diffeomorphism of parameters changes it.

    Where dφ has a kernel, as for ReLU networks with their rescalings, the volume is zero and says
    nothing. Measure along a slice instead: `basis` spans it, and "tangent" takes the orthogonal
    complement of the kernel at the minimum. The volume element is then the product of the nonzero
    singular values along the slice.

    Args:
        phi: a function of ξ, or a module with `inputs`.
        loss: a number from φ's values.
        minimum: w₀; None for a module's own parameters. It may lie above the lowest point of S by
            a hundredth of ε.
        epsilon: how far the loss may rise.
        inputs, metric, reduction: of (Z, g), as everywhere in `geometry`.
        basis: (p, k) directions to stay in, or "tangent"; at most three, as are parameters
            without a basis.
        tolerance: singular values below it, relative to the largest, count as zero.

    >>> def saddle(w):
    ...     return torch.stack([w[0], w[1], w[0] * w[1]])
    >>> origin = torch.zeros(2, dtype=torch.float64)
    >>> found = flatness(saddle, lambda z: z[0] ** 2 + z[1] ** 2, origin, epsilon=1.0)
    >>> print(f"{found.volume:.3f}")  # 2π(2√2 − 1)/3
    3.829
    """
    require_number("epsilon", epsilon, positive=True)
    at = Parametrization(phi, minimum, metric, inputs, reduction)
    landscape = Landscape(at, loss, basis, tolerance)
    landscape.check(epsilon)
    start = torch.zeros(1, landscape.dimension, dtype=torch.float64, device=landscape.basis.device)
    if landscape.dimension == 0 or not bool(landscape.density(start)[0] > 0):
        raise PullbackError(
            "The pullback volume is zero",
            f"dφ has rank {landscape.rank} at the minimum, along {landscape.dimension} directions",
            'Measure on a slice: basis="tangent", or the columns of your own',
        )
    if landscape.dimension not in _RESOLUTION:
        raise PullbackError(
            "A grid is too coarse here",
            f"it would have {landscape.dimension} dimensions",
            "Measure along up to three directions: basis=, a matrix (p, 3)",
        )
    volume, error, euclidean = float("inf"), float("nan"), float("inf")
    box = _stable_box(landscape, epsilon) if round_landscape(landscape, epsilon) else None
    if box is not None:
        fine = _RESOLUTION[landscape.dimension]
        volume, euclidean = _integral(landscape, epsilon, box, fine)
        error = abs(volume - _integral(landscape, epsilon, box, fine // 2)[0])
    return Flatness(
        volume,
        error,
        euclidean * float(torch.linalg.svdvals(landscape.basis).prod()),
        box is not None,
        landscape.rank,
        landscape.dimension,
        landscape.evaluations,
    )


def _stable_box(landscape: Landscape, epsilon: float) -> np.ndarray | None:
    """A box around the set that finer grids do not enlarge; None where there is none.

    Arms that get thinner without end look finite on every grid, and longer on a finer one.
    """
    # along each axis the set reaches about as far as 1
    box, count = np.outer([-1.2, 1.2], np.ones(landscape.dimension)), _COARSE[landscape.dimension]
    found = _enclose(landscape, epsilon, box, count)
    while found is not None and count < _RESOLUTION[landscape.dimension]:
        count = 2 * count
        finer = _enclose(landscape, epsilon, found, count)
        if finer is not None and (np.abs(finer - found) <= 0.05 * (found[1] - found[0])).all():
            return np.stack([np.minimum(finer[0], found[0]), np.maximum(finer[1], found[1])])
        found = finer
    return None


def _enclose(
    landscape: Landscape, epsilon: float, box: np.ndarray, count: int
) -> np.ndarray | None:
    """Lower and upper corner (2, k) of a box around the set; None where it has no end."""
    while True:
        heights = _heights(landscape, box, count)
        inside = _component(heights, box, epsilon)
        landscape.refuse_lower(torch.from_numpy(heights[inside]), epsilon)
        # which faces (2, k) of the box the set touches
        axes = range(inside.ndim)
        touched = np.array([[inside.take(end, axis).any() for axis in axes] for end in (0, -1)])
        if not touched.any():
            return _shrink_box(inside, box)
        # such a face moves away from the minimum
        box = np.where(touched, _GROWTH * box, box)
        if (np.abs(box) > _FAR).any():
            return None


def _points(box: np.ndarray, count: int, landscape: Landscape) -> Tensor:
    """Midpoints of `count` cells along each axis, (count^k, k)."""
    axes = [low + (high - low) * (np.arange(count) + 0.5) / count for low, high in box.T]
    mesh = np.meshgrid(*axes, indexing="ij")
    return torch.from_numpy(np.stack([m.ravel() for m in mesh], 1)).to(landscape.map)


def _heights(landscape: Landscape, box: np.ndarray, count: int) -> np.ndarray:
    heights = landscape.height(_points(box, count, landscape))
    return heights.cpu().numpy().reshape((count,) * landscape.dimension)


def _component(heights: np.ndarray, box: np.ndarray, epsilon: float) -> np.ndarray:
    """The cells below ε that hang together with the one at the minimum."""
    labels = np.asarray(scipy.ndimage.label(heights < epsilon)[0])  # pyright: ignore[reportIndexIssue]
    count = heights.shape[0]
    cell = tuple(min(count - 1, int(count * -low / (high - low))) for low, high in box.T)
    # the minimum's own cell may lie across the boundary on a coarse grid: look around it
    near = [
        labels[tuple(np.clip(np.add(cell, offset), 0, count - 1))]
        for offset in sorted(
            product((0, -1, 1), repeat=heights.ndim), key=lambda o: np.abs(o).sum()
        )
    ]
    label = next((n for n in near if n), 0)
    return (labels == label) & (label > 0)


def _shrink_box(inside: np.ndarray, box: np.ndarray) -> np.ndarray:
    """The box around the set with two coarse cells to spare."""
    count = inside.shape[0]
    width = (box[1] - box[0]) / count
    out = box.copy()
    for axis in range(inside.ndim):
        others = tuple(a for a in range(inside.ndim) if a != axis)
        cells = np.flatnonzero(inside.any(others))
        if not len(cells):
            return box
        out[0, axis] = box[0, axis] + (cells[0] - 2) * width[axis]
        out[1, axis] = box[0, axis] + (cells[-1] + 3) * width[axis]
    return out


def _integral(
    landscape: Landscape, epsilon: float, box: np.ndarray, count: int
) -> tuple[float, float]:
    """∫_S √det G dθ and ∫_S dθ by the midpoint rule, along the axes of the loss's curvature.

    Cells that the boundary cuts count by the share below ε of a plane with the height's slope.
    """
    heights = _heights(landscape, box, count)
    inside = _component(heights, box, epsilon)
    # what lies next to the component may be cut by its boundary
    near = scipy.ndimage.binary_dilation(inside, iterations=1)
    finite = np.where(np.isfinite(heights), heights, epsilon + 2 * abs(epsilon))
    slopes = np.gradient(finite) if landscape.dimension > 1 else [np.gradient(finite)]
    spread = np.maximum(sum(np.abs(s) for s in slopes), 1e-300)
    share = np.clip(0.5 + (epsilon - finite) / spread, 0.0, 1.0) * near
    cells = np.flatnonzero(share)
    points = _points(box, count, landscape)[torch.from_numpy(cells).to(landscape.map.device)]
    density = landscape.density(points).cpu().numpy()
    size = landscape.stretch * float(np.prod((box[1] - box[0]) / count))
    weights = share.ravel()[cells]
    return size * float(weights @ density), size * float(weights.sum())
