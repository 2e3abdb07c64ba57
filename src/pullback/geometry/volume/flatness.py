"""ε-flatness: how much room a minimum has, measured in function space on a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import scipy
import torch
from torch import Tensor

from ..._core.checks import require_number
from ..._core.errors import PullbackError
from ..local.ambient import MetricLike, Parametrization, Phi, Vector
from .landscape import Landscape, round_landscape


@dataclass(frozen=True)
class _Grids:
    """Grids on which the set below F(w₀) + ε is searched and measured."""

    #: cells per axis of the last grid, by dimension: 4,000 to 530,000 points, a few seconds of
    #: losses. `Flatness.error` reports what such a grid leaves.
    fine: Mapping[int, int] = field(default_factory=lambda: {1: 4001, 2: 401, 3: 81})
    #: cells per axis of the first grid; two or four doublings lead to the last one
    coarse: Mapping[int, int] = field(default_factory=lambda: {1: 401, 2: 101, 3: 31})
    #: half the side of the first box. In round coordinates the set reaches to about 1, and a fifth
    #: is added so that most sets do not touch the box.
    first_side: float = 1.2
    #: how much further a face of the box moves if the set touches it; below 2, so that a set that
    #: ends just beyond still has most of the grid's cells
    growth: float = 1.7
    #: the set counts as unbounded if it goes on beyond this many times its reach along the axes: a
    #: grid of a hundred cells would show nothing of its middle long before
    farthest: float = 1e6
    #: the share of a side by which a box may change on the next finer grid and still count as
    #: stable: two to five cells of the coarse grid in two and three dimensions
    stable_share: float = 0.05


_GRIDS = _Grids()


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
    parametrization = Parametrization(phi, minimum, metric, inputs, reduction)
    landscape = Landscape(parametrization, loss, basis, tolerance)
    landscape.refuse_unresolved(epsilon)
    start = torch.zeros(1, landscape.dimension, dtype=torch.float64, device=landscape.basis.device)
    if landscape.dimension == 0 or not bool(landscape.density(start)[0] > 0):
        raise PullbackError(
            "The pullback volume is zero",
            f"dφ has rank {landscape.rank} at the minimum, along {landscape.dimension} directions",
            'Measure on a slice: basis="tangent", or the columns of your own',
        )
    if landscape.dimension not in _GRIDS.fine:
        raise PullbackError(
            "A grid is too coarse here",
            f"it would have {landscape.dimension} dimensions",
            "Measure along up to three directions: basis=, a matrix (p, 3)",
        )
    box = None
    if round_landscape(landscape, epsilon):
        box = _find_stable_box(landscape, epsilon)
    volumes = _Volumes(float("inf"), float("inf"))
    error = float("nan")
    if box is not None:
        fine = _GRIDS.fine[landscape.dimension]
        volumes = _integrate_volumes(landscape, epsilon, box, fine)
        coarser = _integrate_volumes(landscape, epsilon, box, fine // 2)
        error = abs(volumes.riemannian - coarser.riemannian)
    return Flatness(
        volume=volumes.riemannian,
        error=error,
        euclidean=volumes.euclidean * float(torch.linalg.svdvals(landscape.basis).prod()),
        bounded=box is not None,
        rank=landscape.rank,
        dimension=landscape.dimension,
        evaluations=landscape.evaluations,
    )


def _find_stable_box(landscape: Landscape, epsilon: float) -> np.ndarray | None:
    """Return a box around the set that finer grids do not enlarge; None if there is none.

    A box is its lower and upper corner, (2, k). Arms that get thinner without end look finite on
    every grid, and longer on a finer one.
    """
    side = _GRIDS.first_side
    count = _GRIDS.coarse[landscape.dimension]
    first_box = np.outer([-side, side], np.ones(landscape.dimension))
    box = _find_enclosing_box(landscape, epsilon, first_box, count)
    while box is not None and count < _GRIDS.fine[landscape.dimension]:
        count = 2 * count
        finer = _find_enclosing_box(landscape, epsilon, box, count)
        if finer is not None and _are_close(finer, box):
            return np.stack([np.minimum(finer[0], box[0]), np.maximum(finer[1], box[1])])
        box = finer
    return None


def _are_close(finer: np.ndarray, box: np.ndarray) -> bool:
    """Return True if no face has moved by more than a small share of the box's side."""
    return bool((np.abs(finer - box) <= _GRIDS.stable_share * (box[1] - box[0])).all())


def _find_enclosing_box(
    landscape: Landscape, epsilon: float, box: np.ndarray, count: int
) -> np.ndarray | None:
    """Grow the box until the set ends inside, and return one that fits it; None if it never ends.

    Corners are (2, k), and a grid has `count` cells along each axis.
    """
    while True:
        heights = _evaluate_heights(landscape, box, count)
        inside = _select_component(heights, box, epsilon)
        landscape.refuse_lower(torch.from_numpy(heights[inside]), epsilon)
        is_touched = _find_touched_faces(inside)
        if not is_touched.any():
            return _shrink_box(inside, box)
        # such a face moves away from the minimum
        box = np.where(is_touched, _GRIDS.growth * box, box)
        if (np.abs(box) > _GRIDS.farthest).any():
            return None


def _find_touched_faces(inside: np.ndarray) -> np.ndarray:
    """Return True for the faces (2, k) of the grid that have a cell of the set."""
    axes = range(inside.ndim)
    lower = [inside.take(0, axis).any() for axis in axes]
    upper = [inside.take(-1, axis).any() for axis in axes]
    return np.array([lower, upper])


def _list_midpoints(box: np.ndarray, count: int, landscape: Landscape) -> Tensor:
    """Return the midpoints of `count` cells along each axis, (count^k, k)."""
    axes = [low + (high - low) * (np.arange(count) + 0.5) / count for low, high in box.T]
    mesh = np.meshgrid(*axes, indexing="ij")
    return torch.from_numpy(np.stack([m.ravel() for m in mesh], 1)).to(landscape.map)


def _evaluate_heights(landscape: Landscape, box: np.ndarray, count: int) -> np.ndarray:
    """Return F − F(w₀) at the midpoints of the grid's cells, `count` along each of k axes."""
    heights = landscape.height(_list_midpoints(box, count, landscape))
    return heights.cpu().numpy().reshape((count,) * landscape.dimension)


def _select_component(heights: np.ndarray, box: np.ndarray, epsilon: float) -> np.ndarray:
    """Return True for cells below ε that hang together with the one at the minimum.

    On a coarse grid the minimum's own cell may lie across the boundary. Its neighbours are asked
    then, the nearest first.
    """
    labels = np.asarray(scipy.ndimage.label(heights < epsilon)[0])  # pyright: ignore[reportIndexIssue]
    count = heights.shape[0]
    cell = tuple(min(count - 1, int(count * -low / (high - low))) for low, high in box.T)
    offsets = sorted(product((0, -1, 1), repeat=heights.ndim), key=_count_steps)
    for offset in offsets:
        neighbour = tuple(np.clip(np.add(cell, offset), 0, count - 1))
        if labels[neighbour]:
            return labels == labels[neighbour]
    return np.zeros_like(heights, dtype=bool)


def _count_steps(offset: tuple[int, ...]) -> int:
    """Return how many cells an offset goes along the axes, together."""
    return int(np.abs(offset).sum())


def _shrink_box(inside: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return the box around the set with two coarse cells to spare."""
    count = inside.shape[0]
    width = (box[1] - box[0]) / count
    fitted = box.copy()
    for axis in range(inside.ndim):
        other_axes = tuple(a for a in range(inside.ndim) if a != axis)
        cells = np.flatnonzero(inside.any(other_axes))
        if not len(cells):
            return box
        fitted[0, axis] = box[0, axis] + (cells[0] - 2) * width[axis]
        fitted[1, axis] = box[0, axis] + (cells[-1] + 3) * width[axis]
    return fitted


@dataclass(frozen=True)
class _Volumes:
    """∫_S √det G dθ and ∫_S dθ."""

    riemannian: float
    euclidean: float


def _integrate_volumes(
    landscape: Landscape, epsilon: float, box: np.ndarray, count: int
) -> _Volumes:
    """Return both volumes of the set by the midpoint rule, along the axes of the curvature.

    Cells that the boundary cuts count by the share below ε of a plane with the height's slope.
    """
    heights = _evaluate_heights(landscape, box, count)
    inside = _select_component(heights, box, epsilon)
    # what lies next to the component may be cut by its boundary
    may_be_cut = scipy.ndimage.binary_dilation(inside, iterations=1)
    finite = np.where(np.isfinite(heights), heights, epsilon + 2 * abs(epsilon))
    slopes = np.gradient(finite)
    if landscape.dimension == 1:  # where numpy returns the array itself
        slopes = [slopes]
    # the smallest positive number stands for a height without slope
    rise = np.maximum(sum(np.abs(slope) for slope in slopes), np.finfo(np.float64).tiny)
    share = np.clip(0.5 + (epsilon - finite) / rise, 0.0, 1.0) * may_be_cut
    cells = np.flatnonzero(share)
    midpoints = _list_midpoints(box, count, landscape)
    midpoints = midpoints[torch.from_numpy(cells).to(landscape.map.device)]
    density = landscape.density(midpoints).cpu().numpy()
    cell_volume = landscape.stretch * float(np.prod((box[1] - box[0]) / count))
    weights = share.ravel()[cells]
    return _Volumes(cell_volume * float(weights @ density), cell_volume * float(weights.sum()))
