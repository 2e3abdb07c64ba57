"""Steady incompressible flow: Kovasznay's solution."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..conditions import Dirichlet, Equation
from ..domains import Box
from ..kinds import check_positive
from .ready import Ready

_PI = math.pi


def navier_stokes(reynolds: float) -> Equation:
    """u·∇u + ∇p − Δu/Re = 0 and ∇·u = 0: three residuals."""

    def residual(u: Any, v: Any, p: Any) -> Any:
        return (
            u * u.x + v * u.y + p.x - u.laplacian / reynolds,
            u * v.x + v * v.y + p.y - v.laplacian / reynolds,
            u.x + v.y,
        )

    return Equation(residual)


def Kovasznay(reynolds: float = 40.0) -> Ready:
    """Flow behind a grid on [−½, 1] × [−½, 3/2]; velocity on the boundary, p up to a constant.

    u* = 1 − e^(λx) cos 2πy, v* = (λ/2π) e^(λx) sin 2πy, p* = ½(1 − e^(2λx)),
    λ = Re/2 − √(Re²/4 + 4π²).
    """
    re = check_positive("The Reynolds number", reynolds)
    rate = re / 2 - math.sqrt(re**2 / 4 + 4 * _PI**2)

    def u(x: Any, y: Any) -> Any:
        return 1 - torch.exp(rate * x) * torch.cos(2 * _PI * y)

    def v(x: Any, y: Any) -> Any:
        return torch.exp(rate * x) * torch.sin(2 * _PI * y) * (rate / (2 * _PI))

    return Ready(
        Box([(-0.5, 1), (-0.5, 1.5)]),
        [
            navier_stokes(re),
            Dirichlet(u, field="u", name="dirichlet u"),
            Dirichlet(v, field="v", name="dirichlet v"),
        ],
        fields=("u", "v", "p"),
        exact=lambda x, y: (u(x, y), v(x, y), 0.5 - 0.5 * torch.exp(2 * rate * x)),
        free=("p",),
        name=f"Kovasznay Re={re:g}",
        equation=f"u·∇u + ∇p = Δu/{re:g}, ∇·u = 0",
    )
