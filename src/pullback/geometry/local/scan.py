"""Where φ loses rank: scans over a grid or along a path of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .ambient import MetricLike
from .coordinates import Phi, Vector
from .point import Point
from .spectrum import Rank


@dataclass(frozen=True)
class SingularPoint:
    """A parameter where dφ has fewer dimensions than elsewhere on the scan.

    Attributes:
        xi: where, in the form of the scan's parameters.
        place: where on the scan: index i, or i + s between i and i + 1 of a path.
        rank: at xi, of singular values above `tolerance`.
        smallest: σ_d there, d the largest rank on the scan, relative to the scan's largest σ_1.
    """

    xi: Any
    place: float
    rank: int
    smallest: float


def singular_points(
    phi: Phi,
    points: Tensor | Sequence[Vector],
    metric: MetricLike = None,
    *,
    inputs: Any = None,
    path: bool = False,
    tolerance: float | None = None,
    rcond: float | None = None,
) -> list[SingularPoint]:
    """Parameters on a grid or a path where the rank of dφ falls below its largest value there.

    On a grid the points themselves are looked at. A path is a polyline through the points: between
    the neighbors of every local minimum of σ_d, d the largest rank, it is minimized, so that a
    zero which no point hits is found. Sizes are relative to the largest σ_1 of the scan.

    Args:
        phi: as in `Point`, like metric, inputs and rcond.
        points: (K, *shape of ξ), or a sequence of parameters.
        metric: g.
        inputs: a module's inputs.
        path: whether neighbors are joined.
        tolerance: the relative σ_d up to which a point is singular: by default rcond on a grid,
            and 10⁴√ε on a path, where the zero is met to √ε only.
        rcond: what counts as zero where ranks are counted.
    """
    sites = list(points)
    if not sites:
        raise PullbackError("The scan is empty", "there are no points", "Pass at least one")

    def spectrum(xi: Vector) -> Rank:
        return Point(phi, xi, metric, inputs=inputs, rcond=rcond, check=False).rank

    ranks = [spectrum(xi) for xi in sites]
    dimension = max(r.rank for r in ranks)
    if dimension == 0:
        return []
    top = max(float(r.spectrum[0]) for r in ranks)
    ratios = [float(r.spectrum[dimension - 1]) / top for r in ranks]
    limit = max(r.tolerance for r in ranks) / top if tolerance is None else tolerance
    found = {
        float(i): SingularPoint(
            xi, float(i), int((ranks[i].spectrum > limit * top).sum()), ratios[i]
        )
        for i, xi in enumerate(sites)
        if ratios[i] <= limit
    }
    if path:
        eps = torch.finfo(ranks[0].spectrum.dtype).eps
        limit = 1e4 * eps**0.5 if tolerance is None else tolerance
        for i, j in _valleys(ratios):
            point = _lowest(lambda xi: spectrum(xi).spectrum / top, sites, (i, j), dimension, limit)
            if point.smallest <= limit and all(abs(point.place - k) > 1e-6 for k in found):
                found[point.place] = point
    return [found[place] for place in sorted(found)]


def _lowest(
    spectrum: Callable[[Any], Tensor],
    sites: list[Any],
    bounds: tuple[int, int],
    dimension: int,
    limit: float,
) -> SingularPoint:
    """Where σ_d is smallest on one segment of the path."""

    def ratio(place: float) -> float:
        return float(spectrum(_between(sites, place))[dimension - 1])

    best: Any = scipy.optimize.minimize_scalar(
        ratio, bounds=bounds, method="bounded", options={"xatol": 1e-10}
    )
    place = float(best.x)
    xi = _between(sites, place)
    return SingularPoint(xi, place, int((spectrum(xi) > limit).sum()), float(best.fun))


def _valleys(ratios: list[float]) -> Iterable[tuple[int, int]]:
    """Intervals around local minima."""
    last = len(ratios) - 1
    for i, r in enumerate(ratios):
        left, right = max(i - 1, 0), min(i + 1, last)
        if r <= ratios[left] and r <= ratios[right]:
            if left < i:
                yield left, i
            if i < right:
                yield i, right


def _between(sites: list[Any], place: float) -> Any:
    """The point of the polyline at i + s."""
    i = min(int(place), len(sites) - 2)
    s = place - i
    a, b = sites[i], sites[i + 1]
    if isinstance(a, Tensor):
        return (1 - s) * a + s * b
    return {n: (1 - s) * a[n] + s * b[n] for n in a}
