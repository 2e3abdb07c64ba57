"""The volume of a connected sublevel set in many dimensions, by hit-and-run.

In coordinates u that make the loss's curvature round, balls B₀ ⊂ B₁ ⊂ … of radii r_k = r₀ 2^{k/d}
grow until they hold the set S, and

    vol S = vol(S ∩ B₀) ∏_k vol(S ∩ B_k) / vol(S ∩ B_{k−1}).

The first volume is a ball's times the share of its points that lie in S; each ratio comes from
chains that are uniform in S ∩ B_k: from a point, along a random line, to a uniform point of the
*connected* segment inside. Instead of counting points, each segment gives the share of its
length inside B_{k−1}.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import lgamma, log, pi

import numpy as np
import scipy
import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .landscape import Landscape, Rounded, round_landscape

#: points per axis of the last grid, by dimension
_RESOLUTION = {1: 4001, 2: 401, 3: 81}
_COARSE = {1: 401, 2: 101, 3: 31}
#: the set is unbounded where it goes on beyond this
_FAR = 1e6
_GROWTH = 1.7


@dataclass(frozen=True)
class Volume:
    """Of a set, in the pulled-back metric and in the parameters' own, with error bars."""

    pulled: float
    error: float
    euclidean: float
    bounded: bool


def on_grid(landscape: Landscape, epsilon: float) -> Volume:
    """∫_S √det G dθ by the midpoint rule; the error bar is the change from half the resolution.

    The grid lies along the axes of the loss's curvature. Cells that the boundary cuts count by the
    share below ε of a plane with the height's slope.
    """
    dimension = landscape.dimension
    if dimension not in _RESOLUTION:
        raise PullbackError(
            "A grid is too coarse here",
            f"it would have {dimension} dimensions",
            'Use method="hit-and-run"',
        )
    around, fine = round_landscape(landscape, epsilon), _RESOLUTION[dimension]
    box = None if around is None else _settled(around, epsilon)
    if around is None or box is None:
        return Volume(float("inf"), float("nan"), float("inf"), bounded=False)
    pulled, euclidean = _integral(around, epsilon, box, fine)
    rough, _ = _integral(around, epsilon, box, fine // 2)
    return Volume(pulled, abs(pulled - rough), euclidean, bounded=True)


def _settled(landscape: Rounded, epsilon: float) -> np.ndarray | None:
    """A box around the set that finer grids do not enlarge; None where there is none.

    Arms that get thinner without end look finite on every grid, and longer on a finer one.
    """
    # along each axis the set reaches about as far as 1
    box, count = np.outer([-1.2, 1.2], np.ones(landscape.dimension)), _COARSE[landscape.dimension]
    found = _around(landscape, epsilon, box, count)
    while found is not None and count < _RESOLUTION[landscape.dimension]:
        count = 2 * count
        finer = _around(landscape, epsilon, found, count)
        if finer is not None and (np.abs(finer - found) <= 0.05 * (found[1] - found[0])).all():
            return np.stack([np.minimum(finer[0], found[0]), np.maximum(finer[1], found[1])])
        found = finer
    return None


def _around(landscape: Rounded, epsilon: float, box: np.ndarray, count: int) -> np.ndarray | None:
    """Lower and upper corner (2, k) of a box around the set; None where it has no end."""
    while True:
        heights = _heights(landscape, box, count)
        inside = _component(heights, box, epsilon)
        landscape.landscape.refuse_lower(torch.from_numpy(heights[inside]), epsilon)
        touched = _touched(inside)
        if not touched.any():
            return _tight(inside, box)
        # a face that the set touches moves away from the minimum
        box = np.where(touched, _GROWTH * box, box)
        if (np.abs(box) > _FAR).any():
            return None


def _points(box: np.ndarray, count: int, landscape: Rounded) -> Tensor:
    """Midpoints of `count` cells along each axis, (count^k, k)."""
    axes = [low + (high - low) * (np.arange(count) + 0.5) / count for low, high in box.T]
    mesh = np.meshgrid(*axes, indexing="ij")
    return torch.from_numpy(np.stack([m.ravel() for m in mesh], 1)).to(landscape.map)


def _heights(landscape: Rounded, box: np.ndarray, count: int) -> np.ndarray:
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


def _touched(inside: np.ndarray) -> np.ndarray:
    """Which faces (2, k) of the box the set touches."""
    out = np.zeros((2, inside.ndim), dtype=bool)
    for axis in range(inside.ndim):
        out[0, axis] = inside.take(0, axis).any()
        out[1, axis] = inside.take(-1, axis).any()
    return out


def _tight(inside: np.ndarray, box: np.ndarray) -> np.ndarray:
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
    landscape: Rounded, epsilon: float, box: np.ndarray, count: int
) -> tuple[float, float]:
    """∫_S √det G dθ and ∫_S dθ."""
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
    size = float(np.exp(landscape.log_unit) * np.prod((box[1] - box[0]) / count))
    weights = share.ravel()[cells]
    return size * float(weights @ density), size * float(weights.sum())


_PROBES, _BISECTIONS = 16, 14
_PHASES, _DOUBLINGS = 400, 20  # balls at most, and at least so many doublings of their radius
_SETTLING = 16  # moves after which a chain has filled a larger ball: fewer bias every ratio alike


class BallChains:
    """Chains in the part of a sublevel set that lies in a ball."""

    def __init__(
        self,
        landscape: Rounded,
        epsilon: float,
        chains: int,
        generator: torch.Generator,
    ) -> None:
        self.landscape, self.epsilon, self.chains = landscape, epsilon, chains
        self._generator, self._like = generator, landscape.map
        self.dimension = landscape.dimension

    def inside(self, u: Tensor) -> Tensor:
        """Whether points (..., d) lie below ε."""
        return (self.landscape.height(u.flatten(0, -2)) < self.epsilon).view(u.shape[:-1])

    def directions(self, count: int) -> Tensor:
        """Uniform on the sphere, (count, d)."""
        drawn = torch.randn(
            count, self.dimension, dtype=torch.float64, generator=self._generator
        ).to(self._like)
        return drawn / drawn.norm(dim=1, keepdim=True)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1)."""
        return torch.rand(*shape, dtype=torch.float64, generator=self._generator).to(self._like)

    def reach(self, u: Tensor, d: Tensor, longest: Tensor) -> Tensor:
        """How far (n,) the connected segment from u along d goes, at most `longest`."""
        steps = torch.linspace(0, 1, _PROBES + 1, dtype=torch.float64, device=u.device)[1:]
        lengths = longest[:, None] * steps
        below = self.inside(u[:, None] + lengths[..., None] * d[:, None])
        first = torch.where(below.all(1), _PROBES, below.int().argmin(1))
        low = torch.where(first > 0, longest * first / _PROBES, 0.0)
        high = (longest * (first + 1) / _PROBES).minimum(longest)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            ok = self.inside((u + middle[:, None] * d)[:, None])[:, 0]
            low, high = torch.where(ok, middle, low), torch.where(ok, high, middle)
        return torch.where(below.all(1), longest, (low + high) / 2)

    def move(self, u: Tensor, radius: float, inner: float) -> tuple[Tensor, Tensor]:
        """One move of all chains inside the ball, and the segments' shares in the inner ball."""
        d = self.directions(len(u))
        behind, ahead = _chord(u, d, radius)
        back, front = self.reach(u, -d, -behind), self.reach(u, d, ahead)
        low, high = _chord(u, d, inner)
        held = (high.minimum(front) - low.maximum(-back)).clamp_min(0).nan_to_num(0.0)
        share = held / (front + back).clamp_min(torch.finfo(u.dtype).tiny)
        place = -back + self.uniform(len(u)) * (front + back)
        return u + place[:, None] * d, share


def by_hit_and_run(
    landscape: Landscape,
    epsilon: float,
    *,
    chains: int,
    moves: int,
    generator: torch.Generator,
) -> Volume:
    """∫_S √det G dθ with its standard error, from `moves` moves of every chain per ball."""
    around = round_landscape(landscape, epsilon)
    if around is None:
        return Volume(float("inf"), float("nan"), float("inf"), bounded=False)
    sampler = BallChains(around, epsilon, chains, generator)
    d, settling = sampler.dimension, max(_SETTLING, moves // 4)
    radius = _first_radius(sampler)
    u, share, spread = _start(sampler, radius)
    logarithm = log(share) + d * log(radius) + 0.5 * d * log(pi) - lgamma(d / 2 + 1)
    variance = spread**2
    for _ in range(max(_PHASES, _DOUBLINGS * d)):
        inner, radius = radius, radius * 2 ** (1 / d)
        shares = []
        for move in range(settling + moves):
            u, held = sampler.move(u, radius, inner)
            if move >= settling:
                shares.append(held)
        landscape.refuse_lower(around.height(u), epsilon)
        per_chain = torch.stack(shares).mean(0)
        ratio = float(per_chain.mean())
        error = float(per_chain.std()) / len(per_chain) ** 0.5
        logarithm -= log(ratio)
        variance += (error / ratio) ** 2
        if ratio > 1 - 1e-9 and float(u.norm(dim=1).max()) < inner:
            break
    else:
        return Volume(float("inf"), float("nan"), float("inf"), bounded=False)
    euclidean = float(torch.tensor(logarithm + around.log_unit, dtype=torch.float64).exp())
    mean, error = _mean_density(sampler, u, radius, moves)
    pulled = euclidean * mean
    relative = (variance + (error / mean) ** 2) ** 0.5 if mean > 0 else float("nan")
    return Volume(pulled, pulled * relative, euclidean, bounded=True)


def _mean_density(sampler: BallChains, u: Tensor, radius: float, moves: int) -> tuple[float, float]:
    """The mean of √det G over the set, and its error, from points some moves apart."""
    every, found = max(1, moves // 16), []
    for move in range(moves):
        u, _ = sampler.move(u, radius, radius)
        if move % every == every - 1:
            found.append(sampler.landscape.density(u))
    per_chain = torch.stack(found).mean(0)
    return float(per_chain.mean()), float(per_chain.std()) / len(per_chain) ** 0.5


def _first_radius(sampler: BallChains) -> float:
    """A ball whose points are mostly in the set: half the way to the nearest end seen."""
    d = sampler.directions(max(64, 4 * sampler.dimension))
    zero = torch.zeros_like(d)
    longest = torch.full((len(d),), 4.0, dtype=torch.float64, device=d.device)
    nearest = float(sampler.reach(zero, d, longest).min())
    if not nearest > 0:
        raise PullbackError(
            "The point is no minimum",
            "the loss rises above ε at once in some direction, or is lower elsewhere",
            "Descend further, or raise epsilon",
        )
    return 0.5 * nearest


def _start(sampler: BallChains, radius: float) -> tuple[Tensor, float, float]:
    """Chains uniform in S ∩ B₀, the share of B₀ that lies in S, and its relative error."""
    wanted, found, tried, hits = sampler.chains, [], 0, 0
    while hits < wanted:
        d = sampler.directions(4 * wanted)
        u = radius * sampler.uniform(len(d))[:, None] ** (1 / sampler.dimension) * d
        ok = sampler.inside(u[:, None])[:, 0]
        tried, hits = tried + len(u), hits + int(ok.sum())
        found.append(u[ok])
        if tried > 1000 * wanted:
            raise PullbackError(
                "The sublevel set is too thin to sample",
                f"{hits} of {tried} points near the minimum are below epsilon",
                "Raise epsilon, or start from a better minimum",
            )
    share = hits / tried
    return torch.cat(found)[:wanted], share, ((1 - share) / hits) ** 0.5


def _chord(u: Tensor, d: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Where the line u + t·d enters and leaves the ball; not a number where it misses it."""
    along = (u * d).sum(1)
    root = (along**2 - (u * u).sum(1) + radius**2).sqrt()
    return -along - root, -along + root
