"""Steady equations: Poisson, also with two scales and as an energy, Helmholtz, and a flow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..._core.errors import PullbackError
from ..arguments import check_positive, is_integer, require
from ..domains import Box, Interval
from ..problem.conditions import Dirichlet, Energy, Equation
from .ready import Ready, bump, check_dim, check_number, prefix, wrap_by_distance

Function = Callable[[Any], Any]
_PI = math.pi


def Poisson(dim: int = 2, *, boundary_weight: float = 1.0, hard: bool = False) -> Ready:
    """−Δu = f on [0, 1]^d, u = u* on the boundary.

    The solution u* depends on the dimension:

        d ≤ 3          Π sin πxᵢ, zero on the boundary; hard: u = Π 4xᵢ(1 − xᵢ) · N
        4 ≤ d < 10     Σ sin πxᵢ
        10 ≤ d < 100   x₁x₂ + x₃x₄ + …, plus x_d where d is odd; harmonic: f = 0
        d ≥ 100        ‖x‖², f = −2d

    >>> Poisson(dim=2)
    Poisson 2D(Box([(0.0, 1.0), (0.0, 1.0)], names=('x', 'y')), equation, dirichlet)
    """
    exact, f, text = _poisson(check_dim("Poisson problem", dim))
    box = Box([(0, 1)] * dim)
    if hard and dim > 3:
        raise PullbackError(
            f"Poisson in {dim} dimensions has no hard boundary values",
            "its solution is not zero on the boundary",
            "Use hard=False, or dim ≤ 3",
        )
    boundary_value = 0.0 if dim <= 3 else exact
    return Ready(
        box,
        [Equation(lambda u, points: u.laplacian + f(points))],
        soft=[Dirichlet(boundary_value, weight=boundary_weight)],
        hard=hard,
        wrap=wrap_by_distance(box, bump(box)),
        exact=exact,
        name=f"Poisson {dim}D",
        equation=f"−Δu = f, u* = {text}",
    )


def _poisson(dim: int) -> tuple[Function, Function, str]:
    """u* and f = −Δu*, functions of points (N, d), and u* in words."""
    if dim <= 3:
        return _sines, lambda points: dim * _PI**2 * _sines(points), "Π sin πxᵢ"
    if dim < 10:

        def total(points: Any) -> Any:
            return torch.sin(_PI * points).sum(-1)

        return total, lambda points: _PI**2 * total(points), "Σ sin πxᵢ"
    if dim < 100:

        def pairs(points: Any) -> Any:
            even = dim - dim % 2
            out = (points[:, 0:even:2] * points[:, 1:even:2]).sum(-1)
            if dim % 2:
                return out + points[:, -1]
            return out

        return pairs, lambda points: 0.0, "x₁x₂ + x₃x₄ + …"
    return lambda points: (points**2).sum(-1), lambda points: -2.0 * dim, "‖x‖²"


def _sines(points: Any) -> Any:
    """Π sin πxᵢ, (N,)."""
    out: Any = 1.0
    for i in range(points.shape[-1]):
        out = out * torch.sin(_PI * points[:, i])
    return out


def Multiscale(waves: int = 50, amplitude: float = 0.1, *, boundary_weight: float = 1.0) -> Ready:
    """−u″ = f on [0, 1], u = 0 on the boundary, u* = sin 2πx + a sin nπx.

    With n = 50 and a = 0.1 a tenth of u* makes up nearly all of f, sixty times the slow part's.
    """
    remedy = "Use integers ≥ 1, for which the solution is zero on the boundary"
    require(is_integer(waves, 1), "The number of half waves", waves, remedy)
    a = check_number("amplitude", amplitude)
    fast = waves * _PI

    def exact(x: Any) -> Any:
        return torch.sin(2 * _PI * x) + a * torch.sin(fast * x)

    def source(x: Any) -> Any:
        return 4 * _PI**2 * torch.sin(2 * _PI * x) + a * fast**2 * torch.sin(fast * x)

    return Ready(
        Interval(0, 1),
        [Equation(lambda u, x: u.xx + source(x)), Dirichlet(0.0, weight=boundary_weight)],
        exact=exact,
        name=f"Multiscale n={waves} a={a:g}",
        equation=f"−u″ = f, u* = sin 2πx + {a:g} sin {waves}πx",
    )


def Helmholtz(a1: int = 1, a2: int = 4, k: float = 1.0, *, hard: bool = False) -> Ready:
    """Δu + k²u = q on [−1, 1]², u = 0 on the boundary, u* = sin a₁πx · sin a₂πy.

    q = (k² − (a₁² + a₂²)π²) u*. Hard: u = (1 − x²)(1 − y²) · N.
    """
    usable = is_integer(a1, 1) and is_integer(a2, 1)
    remedy = "Use integers ≥ 1, for which the solution is zero on the boundary"
    require(usable, "One of the wave numbers (a1, a2)", (a1, a2), remedy)
    k = check_number("wave number", k)
    box = Box([(-1, 1)] * 2)
    scale = k**2 - (a1**2 + a2**2) * _PI**2

    def exact(x: Any, y: Any) -> Any:
        return torch.sin(a1 * _PI * x) * torch.sin(a2 * _PI * y)

    return Ready(
        box,
        [Equation(lambda u, x, y: u.laplacian + k**2 * u - scale * exact(x, y))],
        soft=[Dirichlet(0.0)],
        hard=hard,
        wrap=wrap_by_distance(box, bump(box)),
        exact=exact,
        name=f"Helmholtz a=({a1}, {a2}) k={k:g}",
        equation=f"Δu + {prefix(k**2)}u = q, u* = sin {prefix(a1)}πx sin {prefix(a2)}πy",
    )


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
    exact, f, text = _poisson(check_dim("Ritz problem", dim, high=3))
    box = Box([(0, 1)] * dim)

    def density(u: Any, points: Any) -> Any:
        return 0.5 * u.grad.square().sum(-1) - f(points) * u

    return Ready(
        box,
        [Energy(density)],
        exact=exact,
        name=f"Ritz Poisson {dim}D",
        equation=f"min ∫ ½|∇u|² − fu, u* = {text}",
        hard=True,
        wrap=wrap_by_distance(box, bump(box)),
    )


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
