"""Energies to minimize: the deep Ritz method."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..conditions import Energy
from ..domains import Box, Interval
from .elliptic import _poisson
from .ready import Ready, bump, checked_dim, distance

_PI = math.pi


def Ritz1D() -> Ready:
    """min ∫ ½u'² + ¼u⁴ − f u on [−1, 1], with natural boundary conditions; u* = cos πx.

    The minimizer satisfies −u'' + u³ = f and u'(±1) = 0, so f = π² cos πx + cos³ πx.
    """

    def exact(x: Any) -> Any:
        return torch.cos(_PI * x)

    def density(u: Any, x: Any) -> Any:
        f = _PI**2 * exact(x) + exact(x) ** 3
        return 0.5 * u.x**2 + 0.25 * u**4 - f * u

    return Ready(
        Interval(-1, 1),
        [Energy(density)],
        exact=exact,
        name="Ritz 1D",
        equation="min ∫ ½u'² + ¼u⁴ − fu, u* = cos πx",
    )


def RitzPoisson(dim: int = 2) -> Ready:
    """min ∫ ½|∇u|² − f u on [0, 1]^d, d ≤ 3, u* = Π sin πxᵢ; zero boundary values are hard.

    Minimizers of the energy with a boundary penalty solve another problem (they are off by
    O(1/penalty)), so there is no soft variant: use `wrap`.
    """
    exact, f, text = _poisson(checked_dim("Ritz problem", dim, high=3))
    box = Box([(0, 1)] * dim)

    def density(u: Any, points: Any) -> Any:
        return 0.5 * u.grad.square().sum(-1) - f(points) * u

    return Ready(
        box,
        [Energy(density)],
        exact=exact,
        name=f"Ritz Poisson {dim}D",
        equation=f"min ∫ ½|∇u|² − fu, u* = {text}",
        hard=distance(box, bump(box)),
    )
