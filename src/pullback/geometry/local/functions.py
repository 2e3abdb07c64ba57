"""Questions about a model's differential, at a point and over many points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor

from ..._core.errors import PullbackError
from .ambient import MetricLike, Phi, Vector
from .inverses import Inverse, Rank
from .point import Loss, Point


def pushforward(phi: Phi, xi: Vector | None, v: Vector, **options: Any) -> Tensor:
    """dφ_ξ v, in the shape of φ(ξ); v is shaped like ξ. Options are those of `Point`.

    >>> import torch
    >>> pushforward(lambda x: x**2, torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    tensor([2., 6.])
    """
    return Point(phi, xi, **options).pushforward(v)


def gram(phi: Phi, xi: Vector | None = None, metric: MetricLike = None, **options: Any) -> Tensor:
    """G_ij = g(∂_i, ∂_j) as a matrix (p, p), in the order of the flattened ξ."""
    return Point(phi, xi, metric, **options).gram()


def natural_parameter_gradient(
    phi: Phi,
    xi: Vector | None,
    grad_or_loss: Loss | Vector,
    metric: MetricLike = None,
    *,
    inverse: Inverse | None = None,
    **options: Any,
) -> Tensor | dict[str, Tensor]:
    """G⁻∇_ξ L in the form of ξ, an ascent direction.

    Args:
        phi: a function of ξ, or a module (then with inputs=).
        xi: where; None for a module's own parameters.
        grad_or_loss: L as a function of φ(ξ), or ∇_ξ L in the form of ξ.
        metric: g; see `Point`.
        inverse: Moore–Penrose by default; see `Point.natural_gradient`.
        options: those of `Point`.

    >>> import torch
    >>> phi = lambda x: torch.stack([x[0] + x[1], 0 * x[0]])
    >>> x = natural_parameter_gradient(phi, torch.tensor([2.0, 1.0]), lambda z: z[0] ** 2)
    >>> x.round(decimals=4)
    tensor([3., 3.])
    """
    return Point(phi, xi, metric, **options).natural_gradient(grad_or_loss, inverse)


def project(
    phi: Phi, xi: Vector | None, v: Tensor, metric: MetricLike = None, **options: Any
) -> Tensor:
    """Π v, the g-orthogonal projection of a tangent vector of Z on the image of dφ_ξ."""
    return Point(phi, xi, metric, **options).project(v)


def rank(phi: Phi, xi: Vector | None = None, metric: MetricLike = None, **options: Any) -> Rank:
    """The rank of dφ_ξ with its spectrum, tolerance and gap."""
    return Point(phi, xi, metric, **options).rank


@dataclass(frozen=True)
class Occurrence:
    """How much of a parameter set, and of its image, lies where dφ is close to losing rank.

    Attributes:
        thresholds: τ, relative to the largest σ_1 drawn.
        parameters: the share of the drawn parameters with σ_d ≤ τ·σ_1.
        model: the share of the image they cover, by volume with multiplicity: each parameter
            weighs σ_1⋯σ_d, the factor by which dφ stretches the volume transverse to its kernel.
        dimension: d, the largest rank drawn.
        count: how many parameters were drawn.
    """

    thresholds: tuple[float, ...]
    parameters: tuple[float, ...]
    model: tuple[float, ...]
    dimension: int
    count: int


def occurrence(
    phi: Phi,
    draw: Callable[[torch.Generator], Vector],
    metric: MetricLike = None,
    *,
    inputs: Any = None,
    count: int = 1000,
    thresholds: Sequence[float] = (1e-1, 1e-2, 1e-3, 0.0),
    seed: int = 0,
    rcond: float | None = None,
) -> Occurrence:
    r"""A numerical look at Sard's theorem: non-proper points have measure zero *in the model*.

    Parameters are drawn at random. By the coarea formula ∫ σ_1⋯σ_d dξ over a set of parameters is
    the volume of its image, each point counted with the volume of parameters that stand for it;
    where σ_d = 0 the integrand is, so the share of the model falls to zero with τ, even where the
    share of the parameters does not.

    Args:
        phi: as in `Point`, like metric, inputs and rcond.
        draw: one random parameter from a generator.
        metric: g.
        inputs: a module's inputs.
        count: how many parameters to draw.
        thresholds: τ.
        seed: of the generator.
        rcond: what counts as zero where ranks are counted; σ's below it are zeros.
    """
    if count < 1:
        raise PullbackError("Nothing is drawn", f"got count={count}", "Draw at least one")
    generator = torch.Generator().manual_seed(seed)
    spectra = []
    for _ in range(count):
        rank = Point(phi, draw(generator), metric, inputs=inputs, rcond=rcond, check=False).rank
        kept = torch.where(rank.spectrum > rank.tolerance, rank.spectrum, 0.0)
        spectra.append(kept.double().cpu())
    sigma = torch.stack(spectra)
    dimension = int((sigma > 0).sum(1).max())
    ratio = torch.zeros(count, dtype=torch.float64)
    weight = torch.zeros(count, dtype=torch.float64)
    if dimension:
        ratio = sigma[:, dimension - 1] / sigma.max()
        weight = sigma[:, :dimension].log().sum(1)
        weight = (weight - weight.max()).exp()
    low = [ratio <= tau for tau in thresholds]
    return Occurrence(
        tuple(float(t) for t in thresholds),
        tuple(float(mask.double().mean()) for mask in low),
        tuple(float(weight[mask].sum() / weight.sum()) if dimension else 0.0 for mask in low),
        dimension,
        count,
    )


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
