"""Steady flow in a cavity that is driven by its lid."""

from __future__ import annotations

from typing import Any

import torch

from pullback.pde import Box, Dirichlet, Ready
from pullback.pde.arguments import check_positive
from pullback.pde.catalog.ready import bump, wrap_by_distance
from pullback.pde.catalog.steady import navier_stokes

from . import references


def Cavity(reynolds: float = 100.0, *, hard: bool = False) -> Ready:
    """Flow in [0, 1]² driven by its lid y = 1, p up to a constant.

    Compared with a Legendre–Galerkin solution. The lid's velocity is 16x²(1−x)²: one of 1 would
    jump at the corners, where p ~ 1/r is not square-integrable. Hard: u = 16x²(1−x)²y² + b·N₁,
    v = b·N₂, p = N₃ with b = 16x(1−x)y(1−y).
    """
    re = check_positive("The Reynolds number", reynolds)
    box = Box([(0, 1)] * 2)

    def lid(x: Any, y: Any) -> Any:
        return torch.where(y >= 1, 16 * x**2 * (1 - x) ** 2, torch.zeros_like(x))

    def walls(points: Any) -> Any:
        edge = bump(box)(points)
        return edge, edge, 0 * edge + 1

    def lid_velocity(x: Any, y: Any) -> Any:
        return 16 * x**2 * (1 - x) ** 2 * y**2, 0 * x, 0 * x

    return Ready(
        box,
        [navier_stokes(re)],
        soft=[
            Dirichlet(lid, field="u", name="dirichlet u"),
            Dirichlet(0.0, field="v", name="dirichlet v"),
        ],
        hard=hard,
        wrap=wrap_by_distance(box, walls, lid_velocity),
        fields=("u", "v", "p"),
        reference=references.Cavity(re),
        free=("p",),
        name=f"Cavity Re={re:g}",
        equation=f"u·∇u + ∇p = Δu/{re:g}, ∇·u = 0, lid 16x²(1−x)²",
    )
