"""The geometry of one point as plain functions; `Point` does several of them from one SVD."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..covectors import Loss
from .ambient import MetricLike
from .coordinates import Phi, Vector
from .inverses import Inverse
from .point import Decomposition, Point
from .spectrum import Rank


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


def residual(
    phi: Phi, xi: Vector | None, loss: Loss, metric: MetricLike = None, **options: Any
) -> Tensor:
    """grad^Z L − Π grad^Z L: the part of the ambient gradient that no parameter can follow."""
    return Point(phi, xi, metric, **options).residual(loss)


def decompose(
    phi: Phi, xi: Vector | None, loss: Loss, metric: MetricLike = None, **options: Any
) -> Decomposition:
    """The ambient gradient, its tangent part and what is lost, with their lengths in g."""
    return Point(phi, xi, metric, **options).decompose(loss)


def rank(phi: Phi, xi: Vector | None = None, metric: MetricLike = None, **options: Any) -> Rank:
    """The rank of dφ_ξ with its spectrum, tolerance and gap."""
    return Point(phi, xi, metric, **options).rank
