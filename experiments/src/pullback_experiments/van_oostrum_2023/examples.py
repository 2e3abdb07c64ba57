"""The paper's examples with their numbers, at the points that it chooses."""

from __future__ import annotations

from collections.abc import Callable
from math import pi

import torch
from torch import Tensor

from pullback.geometry import Point

from ..framework.experiment import Context
from ..framework.records import Record

_SLOPE = (1.0, 0.6)  # of the linear objective in the plane


def _vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _linear(z: Tensor) -> Tensor:
    return z @ _vector(*_SLOPE).to(z)


def _compute_move(point: Point, loss: Callable[[Tensor], Tensor]) -> list[float]:
    """dφ·G⁺∇L."""
    return point.pushforward(point.natural_gradient(loss)).tolist()


def compare_rotated_maps(context: Context) -> Record:
    """Example 1: φ = (ξ₁, ξ₂³) covers the plane and sees one direction at 0; ψ is φ turned by 90°.

    Returns:
        grad L, the moves through φ and ψ, and how many dimensions their spans have together.
    """
    at = torch.zeros(2, dtype=torch.float64, device=context.device)

    def phi(x: Tensor) -> Tensor:
        return torch.stack([x[0], x[1] ** 3])

    def psi(x: Tensor) -> Tensor:
        return torch.stack([-(x[1] ** 3), x[0]])

    one = Point(phi, at)
    two = Point(psi, at)
    joint_rank = torch.linalg.matrix_rank(torch.cat([one.image(), two.image()], 1))
    return {
        "gradient": list(_SLOPE),
        "moves": [_compute_move(one, _linear), _compute_move(two, _linear)],
        "ranks": [one.rank.rank, two.rank.rank, int(joint_rank)],
    }


def eight(x: Tensor) -> Tensor:
    """ξ ↦ (sin 2ξ, sin ξ), (1,) to (2,)."""
    return torch.cat([torch.sin(2 * x), torch.sin(x)])


def compare_at_crossing(context: Context) -> Record:
    """Example 2 and A.2: the figure eight at 0 from ξ = 0, and through f(θ) = π − θ from θ = 0.

    Returns:
        tangent vectors, Grams and moves of both; where ξ = π/2 and π are mapped.
    """
    zero = torch.zeros(1, dtype=torch.float64, device=context.device)
    one = Point(eight, zero)
    two = Point(lambda t: eight(pi - t), zero)
    unit = torch.ones_like(zero)
    return {
        "gradient": list(_SLOPE),
        "tangents": [p.pushforward(unit).tolist() for p in (one, two)],
        "grams": [float(p.gram()) for p in (one, two)],
        "moves": [_compute_move(p, _linear) for p in (one, two)],
        "printed": eight(zero + pi / 2).tolist(),
        "right": eight(zero + pi).tolist(),
    }


def parameters(context: Context) -> Record:
    """A.3: φ = (ξ₁ + ξ₂, 0), f = (2θ₁, θ₂), L = x² at ξ = (2, 1).

    Returns:
        y_Ξ = G⁺∇L, y_Θ = df·G(θ)⁺∇_θL, and their moves of the model.
    """

    def phi(x: Tensor) -> Tensor:
        return torch.stack([x[0] + x[1], 0 * x[0]])

    def loss(z: Tensor) -> Tensor:
        return z[0] ** 2

    f = _vector(2, 1).to(context.device)
    one = Point(phi, _vector(2, 1).to(context.device))
    two = Point(lambda t: phi(f * t), _vector(1, 1).to(context.device))
    gradient = one.natural_gradient(loss)
    other = two.natural_gradient(loss)
    assert isinstance(gradient, Tensor)
    assert isinstance(other, Tensor)
    return {
        "y_xi": gradient.tolist(),
        "y_theta": (f * other).tolist(),
        "moves": [one.pushforward(gradient).tolist(), two.pushforward(other).tolist()],
    }
