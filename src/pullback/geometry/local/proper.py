r"""Properness: whether the parameters can move in every direction in which the model extends.

φ is *proper* in ξ if the image of dφ_ξ is the whole tangent space of M = φ(Ξ) at φ(ξ). The tangent
space is not at hand, but its dimension shows nearby: for an analytic φ the rank of dφ is maximal
almost everywhere, so a random ξ' close to ξ has the rank that the model's sheet through φ(ξ) has
as its dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..._core.checks import require_number
from ..._core.errors import PullbackError
from .ambient import MetricLike, Phi, Vector
from .inverses import Rank
from .point import Point


@dataclass(frozen=True)
class Properness:
    """What was found at ξ; it is true where φ is proper.

    Attributes:
        proper: rank = dimension = span.
        rank: of dφ at ξ, with its spectrum and tolerance.
        dimension: of the model around φ(ξ): the largest rank at the parameters tried nearby.
        span: of the images of dφ at ξ and at the other parameters of the same model point,
            together. Above `dimension` the model has no tangent space there: φ(ξ) is singular.
        radius: the distance of the parameters tried nearby.
        tried: how many of them φ was finite at.
        reason: a sentence.
    """

    proper: bool
    rank: Rank
    dimension: int
    span: int
    radius: float
    tried: int
    reason: str

    @property
    def singular(self) -> bool:
        """Return True if tangent spaces of several parameters differ: the model is no manifold."""
        return self.span > self.dimension

    def __bool__(self) -> bool:
        return self.proper


def properness(
    phi: Phi,
    xi: Vector | None = None,
    metric: MetricLike = None,
    *,
    inputs: Any = None,
    others: Iterable[Vector] = (),
    radius: float = 1e-2,
    tries: int = 8,
    seed: int = 0,
    rcond: float | None = None,
) -> Properness:
    r"""Return whether the image of dφ_ξ is the model's tangent space at φ(ξ), with evidence.

    Decided: ξ is proper if the rank of A = SᵀJ at ξ is the largest rank found at `tries` random
    parameters at the distance radius·max(1, ‖ξ‖) from ξ and from each of `others`, and if the
    images at ξ and at `others` together span no more (angles above √ε count). A rank counts
    singular values above rcond·σ_max of the same matrix (`Point` has the default). So "proper"
    may be wrong where another sheet of the model, with more dimensions or crossing this one,
    passes through φ(ξ) and no parameter on it is among `others`; "not proper" may be wrong
    where the rank rises within the radius although ξ's own sheet has fewer dimensions. At a
    singular point of the model (a crossing, a cusp, an edge) properness has no meaning.

    Args:
        phi: as in `Point`, like xi, metric, inputs and rcond.
        xi: where.
        metric: g; a nonsingular one does not change the answer.
        inputs: a module's inputs.
        others: further parameters with φ = φ(ξ).
        radius: how far to look for the model's dimension, relative to max(1, ‖ξ‖).
        tries: how many parameters to try there.
        seed: of their directions.
        rcond: what counts as zero.
    """
    options = {"inputs": inputs, "rcond": rcond}
    require_number("The radius", radius, positive=True)
    require_number("The number of tries", tries, least=1, whole=True)
    at_xi = Point(phi, xi, metric, **options)
    points = [at_xi]
    for other in others:
        at_other = Point(phi, other, metric, **options)
        _require_same_value(at_other, at_xi)
        points.append(at_other)
    ranks = list[int]()
    for point in points:
        for neighbour in point.draw_neighbours(radius, tries, seed):
            with suppress(PullbackError):  # outside the domain of φ or of g
                ranks.append(Point(phi, neighbour, metric, **options).rank.rank)
    if not ranks:
        raise PullbackError(
            "The model's dimension could not be found",
            f"φ is not finite anywhere it was tried at the distance {radius:.2g}",
            "Lower radius",
        )
    dimension = max(*ranks, *(p.rank.rank for p in points))
    rank = at_xi.rank.rank
    span = rank
    if len(points) > 1:
        span = _count_spanned_dimensions(points)
    return Properness(
        proper=rank == dimension and span <= dimension,
        rank=at_xi.rank,
        dimension=dimension,
        span=span,
        radius=radius,
        tried=len(ranks),
        reason=_explain(rank, dimension, span),
    )


def _explain(rank: int, dimension: int, span: int) -> str:
    """Return the verdict as a sentence."""
    if span > dimension:
        return (
            f"the tangent spaces at this model point span {span} dimensions where the model has "
            f"{dimension}: the point is singular"
        )
    if rank < dimension:
        return f"dφ reaches {rank} of the model's {dimension} dimensions"
    return f"dφ reaches all {dimension} dimensions"


def _require_same_value(other: Point, point: Point) -> None:
    """Raise unless φ has the same value at both points, to √ε."""
    difference = (other.value - point.value).norm()
    limit = torch.finfo(point.value.dtype).eps ** 0.5
    if not bool(difference <= limit * (1 + point.value.norm())):
        raise PullbackError(
            "The other parameters stand for another point of the model",
            f"their values differ by {float(difference):.3g}",
            "Pass parameters with φ(ξ') = φ(ξ)",
        )


def _count_spanned_dimensions(points: list[Point]) -> int:
    """Return the dimension of all images of dφ together, from orthonormal bases of each in g."""
    bases = [point.image() for point in points]
    joined = torch.cat(bases, 1)
    if not joined.shape[1]:
        return 0
    sigma = torch.linalg.svdvals(joined)
    # Columns are orthonormal in each basis. A direction that no other basis has gives a singular
    # value of about 1; one that another basis has up to round-off gives the sine of their angle.
    return int((sigma > torch.finfo(sigma.dtype).eps ** 0.5).sum())
