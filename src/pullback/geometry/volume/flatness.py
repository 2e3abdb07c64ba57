"""ε-flatness: how much room a minimum has, measured in function space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..local.ambient import MetricLike, Phi, Vector
from .grid import on_grid
from .landscape import Landscape


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
    coordinates: any diffeomorphism of parameters leaves it as it is, while Euclidean volume can be
    made anything by rescaling (Dinh et al., 2017). The paper's definition has an open interval,
    which leaves out the minimum itself; nothing changes but a set of measure zero.

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
    if not epsilon > 0:
        raise PullbackError(
            "epsilon is not positive", f"got {epsilon}", "Say how far the loss may rise"
        )
    landscape = Landscape(
        phi,
        loss,
        minimum,
        inputs=inputs,
        metric=metric,
        reduction=reduction,
        basis=basis,
        tolerance=tolerance,
    )
    landscape.check(epsilon)
    start = torch.zeros(1, landscape.dimension, dtype=torch.float64, device=landscape.basis.device)
    if landscape.dimension == 0 or not bool(landscape.density(start)[0] > 0):
        raise PullbackError(
            "The pullback volume is zero",
            f"dφ has rank {landscape.rank} at the minimum, along {landscape.dimension} directions",
            'Measure on a slice: basis="tangent", or the columns of your own',
        )
    volume = on_grid(landscape, epsilon)
    return Flatness(
        volume.pulled,
        volume.error,
        volume.euclidean * landscape.unit,
        volume.bounded,
        landscape.rank,
        landscape.dimension,
        landscape.evaluations,
    )
