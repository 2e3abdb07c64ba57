"""ε-flatness: how much room a minimum has, measured in function space on a grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import scipy
import torch
from torch import Tensor

from ..._core.checks import refuse_number
from ..._core.errors import PullbackError
from ..local.ambient import MetricLike, Parametrization, Phi, Vector
from .landscape import Landscape, round_landscape

#: points per axis of the last grid, by dimension: at most half a million points
_RESOLUTION = {1: 4001, 2: 401, 3: 81}
#: points per axis of the first grid
_COARSE_RESOLUTION = {1: 401, 2: 101, 3: 31}


@dataclass(frozen=True)
class GridThresholds:
    """Numbers that steer the search for a box around the set.

    Attributes:
        margin: half the side of the first box. Along each axis the set reaches about as far as 1.
        largest: coordinates beyond which the set is unbounded.
        growth: the factor by which a face that the set touches moves away. Below 2, so that a set
            that just crosses it still fills most of the next box.
        stability: the share of a box's sides by which a finer grid may move its faces.
    """

    margin: float = 1.2
    largest: float = 1e6
    growth: float = 1.7
    stability: float = 0.05


THRESHOLDS = GridThresholds()


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
    >>> room = flatness(saddle, lambda z: z[0] ** 2 + z[1] ** 2, origin, epsilon=1.0)
    >>> print(f"{room.volume:.3f}")  # 2π(2√2 − 1)/3
    3.829
    """
    refuse_number("epsilon", epsilon, positive=True)
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
    volume = float("inf")
    error = float("nan")
    euclidean = float("inf")
    box = None
    if round_landscape(landscape, epsilon):
        box = _find_stable_box(landscape, epsilon)
    if box is not None:
        resolution = _RESOLUTION[landscape.dimension]
        volume, euclidean = _integrate(landscape, epsilon, box, resolution)
        coarse_volume, _ = _integrate(landscape, epsilon, box, resolution // 2)
        error = abs(volume - coarse_volume)
    return Flatness(
        volume,
        error,
        euclidean * float(torch.linalg.svdvals(landscape.basis).prod()),
        box is not None,
        landscape.rank,
        landscape.dimension,
        landscape.evaluations,
    )


def _find_stable_box(landscape: Landscape, epsilon: float) -> np.ndarray | None:
    """Return a box around the set that finer grids do not enlarge; None where there is none.

    Arms that get thinner without end look finite on every grid, and longer on a finer one.
    """
    corners = [-THRESHOLDS.margin, THRESHOLDS.margin]
    count = _COARSE_RESOLUTION[landscape.dimension]
    box = _enclose(landscape, epsilon, np.outer(corners, np.ones(landscape.dimension)), count)
    while box is not None and count < _RESOLUTION[landscape.dimension]:
        count = 2 * count
        finer = _enclose(landscape, epsilon, box, count)
        if finer is not None and _is_close(box, finer):
            return np.stack([np.minimum(finer[0], box[0]), np.maximum(finer[1], box[1])])
        box = finer
    return None


def _is_close(box: np.ndarray, finer: np.ndarray) -> bool:
    """Return True if a finer grid moved the faces of a box only a little."""
    return bool((np.abs(finer - box) <= THRESHOLDS.stability * (box[1] - box[0])).all())


def _enclose(
    landscape: Landscape, epsilon: float, box: np.ndarray, count: int
) -> np.ndarray | None:
    """Lower and upper corner (2, k) of a box around the set; None where it has no end."""
    while True:
        heights = _evaluate_heights(landscape, box, count)
        is_inside = _find_component(heights, box, epsilon)
        landscape.refuse_lower(torch.from_numpy(heights[is_inside]), epsilon)
        is_touched = _find_touched_faces(is_inside)
        if not is_touched.any():
            return _shrink_box(is_inside, box)
        # Such a face moves away from the minimum.
        box = np.where(is_touched, THRESHOLDS.growth * box, box)
        if (np.abs(box) > THRESHOLDS.largest).any():
            return None


def _find_touched_faces(is_inside: np.ndarray) -> np.ndarray:
    """Return which lower and upper faces (2, k) of the box the set touches."""
    axes = range(is_inside.ndim)
    lower = [is_inside.take(0, axis).any() for axis in axes]
    upper = [is_inside.take(-1, axis).any() for axis in axes]
    return np.array([lower, upper])


def _list_midpoints(box: np.ndarray, count: int, landscape: Landscape) -> Tensor:
    """Midpoints of `count` cells along each axis, (count^k, k)."""
    axes = [low + (high - low) * (np.arange(count) + 0.5) / count for low, high in box.T]
    mesh = np.meshgrid(*axes, indexing="ij")
    return torch.from_numpy(np.stack([m.ravel() for m in mesh], 1)).to(landscape.map)


def _evaluate_heights(landscape: Landscape, box: np.ndarray, count: int) -> np.ndarray:
    """Return the loss above the minimum on a grid, (count, ..., count)."""
    heights = landscape.height(_list_midpoints(box, count, landscape))
    return heights.cpu().numpy().reshape((count,) * landscape.dimension)


def _find_component(heights: np.ndarray, box: np.ndarray, epsilon: float) -> np.ndarray:
    """Return the cells below ε that are connected with the one at the minimum."""
    labels = np.asarray(scipy.ndimage.label(heights < epsilon)[0])  # pyright: ignore[reportIndexIssue]
    count = heights.shape[0]
    cell = tuple(min(count - 1, int(count * -low / (high - low))) for low, high in box.T)
    # On a coarse grid the minimum's own cell may be above ε. Then its neighbors decide.
    offsets = list(product((0, -1, 1), repeat=heights.ndim))
    offsets.sort(key=lambda offset: np.abs(offset).sum())
    for offset in offsets:
        label = labels[tuple(np.clip(np.add(cell, offset), 0, count - 1))]
        if label:
            return labels == label
    return np.zeros_like(labels, dtype=bool)


def _shrink_box(is_inside: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return the box around the set with two coarse cells to spare."""
    width = (box[1] - box[0]) / is_inside.shape[0]
    shrunk = box.copy()
    for axis in range(is_inside.ndim):
        others = tuple(a for a in range(is_inside.ndim) if a != axis)
        cells = np.flatnonzero(is_inside.any(others))
        if not len(cells):
            return box
        shrunk[0, axis] = box[0, axis] + (cells[0] - 2) * width[axis]
        shrunk[1, axis] = box[0, axis] + (cells[-1] + 3) * width[axis]
    return shrunk


def _integrate(
    landscape: Landscape, epsilon: float, box: np.ndarray, count: int
) -> tuple[float, float]:
    """∫_S √det G dθ and ∫_S dθ by the midpoint rule, along the axes of the loss's curvature.

    Cells that the boundary cuts count by the share below ε of a plane with the height's slope.
    """
    heights = _evaluate_heights(landscape, box, count)
    is_inside = _find_component(heights, box, epsilon)
    # The boundary of the component may cut the cells next to it.
    is_near = scipy.ndimage.binary_dilation(is_inside, iterations=1)
    heights = np.where(np.isfinite(heights), heights, epsilon + 2 * abs(epsilon))
    slopes = [np.gradient(heights, axis=axis) for axis in range(landscape.dimension)]
    spread = np.maximum(sum(np.abs(slope) for slope in slopes), 1e-300)
    share = np.clip(0.5 + (epsilon - heights) / spread, 0.0, 1.0) * is_near
    cells = np.flatnonzero(share)
    points = _list_midpoints(box, count, landscape)[
        torch.from_numpy(cells).to(landscape.map.device)
    ]
    density = landscape.density(points).cpu().numpy()
    size = landscape.stretch * float(np.prod((box[1] - box[0]) / count))
    weights = share.ravel()[cells]
    return size * float(weights @ density), size * float(weights.sum())
