"""Equations in time: heat, waves, convection, Burgers, Schrödinger, Fokker–Planck."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..arguments import check_positive
from ..domains import Box, Interval, SpaceTime
from ..problem.conditions import Condition, Dirichlet, Equation, Initial, Periodic
from . import references
from .ready import Ready, bump, check_dim, check_number, prefix, wrap_by_distance, wrap_periodically

_PI = math.pi


def Heat(dim: int = 1, *, boundary_weight: float = 1.0, hard: bool = False) -> Ready:
    """u_t = ¼Δu on [0, 1]^d × [0, 1].

        d = 1   u* = e^(−π²t/4) sin πx, zero boundary; hard: u = sin πx + 4x(1 − x)t · N
        d ≥ 2   u* = e^(−t) Σ sin 2xᵢ on the boundary;  hard: u = Σ sin 2xᵢ + t · N

    For d ≥ 2 the boundary values stay in the loss. The weight is that of boundary and initial
    values.
    """  # fmt: skip
    check_dim("heat equation", dim)
    equation = Equation(lambda u: u.t - 0.25 * u.laplacian)
    if dim == 1:
        return _heat_on_line(equation, boundary_weight, hard)
    box = Box([(0, 1)] * dim)
    domain = SpaceTime(box, (0, 1))

    def exact(points: Any) -> Any:
        return torch.exp(-points[:, -1]) * torch.sin(2 * points[:, :-1]).sum(-1)

    def start(points: Any) -> Any:
        return torch.sin(2 * points[:, :-1]).sum(-1)[:, None]

    return Ready(
        domain,
        [equation, Dirichlet(exact, weight=boundary_weight)],
        soft=[Initial(exact, weight=boundary_weight)],
        hard=hard,
        wrap=wrap_by_distance(domain, lambda points: points[:, -1:], start),
        exact=exact,
        name=f"Heat {dim}+1D",
        equation="u_t = ¼Δu",
    )


def _heat_on_line(equation: Equation, boundary_weight: float, hard: bool) -> Ready:
    """Return the heat equation in one dimension."""
    box = Box([(0, 1)])
    domain = SpaceTime(box, (0, 1))
    edge = bump(box)

    def exact(points: Any) -> Any:
        return torch.exp(points[:, 1] * (-(_PI**2) / 4)) * torch.sin(_PI * points[:, 0])

    def start(points: Any) -> Any:
        return torch.sin(_PI * points[:, :1])

    return Ready(
        domain,
        [equation],
        soft=[
            Dirichlet(0.0, weight=boundary_weight),
            Initial(exact, weight=boundary_weight),
        ],
        hard=hard,
        wrap=wrap_by_distance(domain, lambda points: points[:, -1:] * edge(points), start),
        exact=exact,
        name="Heat 1+1D",
        equation="u_t = ¼Δu",
    )


def Wave(
    speed: float = 2.0, time: float = 1.0, *, boundary_weight: float = 1.0, hard: bool = False
) -> Ready:
    """u_tt = c² u_xx on [0, 1] × [0, T], u = 0 on the boundary, at rest in the beginning.

    u* = sin πx cos cπt + ½ sin 4πx cos 4cπt. Hard: u = u*(x, 0) + 4x(1 − x)t² · N, which has
    the initial velocity 0. The weight is that of boundary and initial values.
    """
    c = check_positive("The speed", speed)
    time = check_positive("The time", time)
    space = Interval(0, 1)
    domain = SpaceTime(space, (0, time))
    edge = bump(space)

    def start(x: Any) -> Any:
        return torch.sin(_PI * x) + 0.5 * torch.sin(4 * _PI * x)

    def exact(x: Any, t: Any) -> Any:
        slow = torch.sin(_PI * x) * torch.cos(c * _PI * t)
        return slow + 0.5 * torch.sin(4 * _PI * x) * torch.cos(4 * c * _PI * t)

    name = f"Wave c={c:g}"
    if time != 1:
        name += f" t ≤ {time:g}"
    return Ready(
        domain,
        [Equation(lambda u: u.tt - c**2 * u.xx)],
        soft=[
            Dirichlet(0.0, weight=boundary_weight),
            Initial(start, velocity=0.0, weight=boundary_weight),
        ],
        hard=hard,
        wrap=wrap_by_distance(domain, lambda points, t: t**2 * edge(points), start),
        exact=exact,
        name=name,
        equation=f"u_tt = {prefix(c**2, ' ')}u_xx",
    )


def Convection(beta: float = 40.0, *, hard: bool = False) -> Ready:
    """u_t + βu_x = 0 on [0, 2π] × [0, 1], periodic, u(x, 0) = sin x; u* = sin(x − βt).

    Hard: u = sin x + t · N(sin x, cos x, t).
    """
    beta = check_number("speed", beta)
    domain = SpaceTime(Interval(0, 2 * _PI), (0, 1))

    def start(x: Any) -> Any:
        return torch.sin(x)

    return Ready(
        domain,
        [Equation(lambda u: u.t + beta * u.x)],
        soft=[Periodic("x", 0), Initial(start)],
        hard=hard,
        wrap=wrap_periodically(domain, start, 2 * _PI),
        exact=lambda x, t: torch.sin(x - beta * t),
        name=f"Convection β={beta:g}",
        equation=f"u_t + {prefix(beta, ' ')}u_x = 0",
    )


def Burgers(viscosity: float = 0.01 / math.pi, *, hard: bool = False) -> Ready:
    """u_t + u u_x = ν u_xx on [−1, 1] × [0, 1], u(x, 0) = −sin πx, u(±1, t) = 0.

    For ν = 0.01/π a layer of width ~ν forms at x = 0 around t = 1/π. Compared with the Cole–Hopf
    formula. Hard: u = −sin πx + (1 − x²)t · N.
    """
    nu = check_positive("The viscosity", viscosity)
    domain = SpaceTime(Interval(-1, 1), (0, 1))

    def start(x: Any) -> Any:
        return -torch.sin(_PI * x)

    return Ready(
        domain,
        [Equation(lambda u: u.t + u * u.x - nu * u.xx)],
        soft=[Dirichlet(0.0), Initial(start)],
        hard=hard,
        wrap=wrap_by_distance(domain, lambda x, t: (1 - x**2) * t, start),
        reference=references.Burgers(nu),
        name=f"Burgers ν={nu:.4g}",
        equation=f"u_t + u u_x = {prefix(nu, ' ')}u_xx",
    )


def Schroedinger(*, initial_weight: float = 1.0, hard: bool = False) -> Ready:
    """i h_t + ½h_xx + |h|²h = 0 for h = u + iv on [−5, 5] × [0, π/2], h(x, 0) = 2 sech x.

    The breather of two solitons, even in x, with its own values at x = ±5:

        h* = 4e^(it/2) (cosh 3x + 3e^(4it) cosh x) / (cosh 4x + 4 cosh 2x + 3 cos 4t).

    Often it is posed periodic instead; that solution has kinks, as 2 sech x does at x = ±5. Hard:
    h = 2 sech x + h*(5, t) − h*(5, 0) + 4(1 − (x/5)²)t · N.
    """
    space = Interval(-5, 5)
    domain = SpaceTime(space, (0, _PI / 2))
    edge = bump(space)

    def exact(x: Any, t: Any) -> Any:
        far = torch.cosh(3 * x)
        near = 3 * torch.cosh(x)
        scale = 4 / (torch.cosh(4 * x) + 4 * torch.cosh(2 * x) + 3 * torch.cos(4 * t))
        return (
            scale * (far * torch.cos(0.5 * t) + near * torch.cos(4.5 * t)),
            scale * (far * torch.sin(0.5 * t) + near * torch.sin(4.5 * t)),
        )

    def lift(x: Any, t: Any) -> Any:
        u, v = exact(0 * x + 5, t)
        return 2 / torch.cosh(x) + u - 2 / math.cosh(5), v

    def residual(u: Any, v: Any) -> Any:
        density = u**2 + v**2
        return u.t + 0.5 * v.xx + density * v, v.t - 0.5 * u.xx - density * u

    soft: list[Condition] = []
    for i, name in enumerate(("u", "v")):

        def component(x: Any, t: Any, i: int = i) -> Any:
            return exact(x, t)[i]

        options: dict[str, Any] = {"field": name, "weight": initial_weight}
        soft += [
            Dirichlet(component, **options, name=f"dirichlet {name}"),
            Initial(component, **options, name=f"initial {name}"),
        ]
    return Ready(
        domain,
        [Equation(residual)],
        soft=soft,
        hard=hard,
        wrap=wrap_by_distance(domain, lambda points, t: t * edge(points), lift),
        fields=("u", "v"),
        exact=exact,
        name="Schrödinger 2 sech x",
        equation="i h_t + ½h_xx + |h|²h = 0, h = u + iv",
    )


def LogFokkerPlanck(dim: int = 9, *, hard: bool = False) -> Ready:
    """q_t = d/2 + ½ x·∇q + Δq + |∇q|² on [−5, 5]^d × [0, 1] for the log-density q.

    p = e^q satisfies p_t = ½∇·(x p) + Δp. From N(0, I) it stays Gaussian with the variance s of
    s' = 2 − s: q* = −½ d log 2πs − ‖x‖²/2s, s = 2 − e^(−t). Boundary and initial values are
    those of q*. Hard: q = q*(x, 0) + t · N, with the boundary values still in the loss.
    """
    check_dim("Fokker–Planck equation", dim)
    domain = SpaceTime(Box([(-5, 5)] * dim), (0, 1))

    def exact(points: Any) -> Any:
        s = 2 - torch.exp(-points[:, -1])
        size = (points[:, :-1] ** 2).sum(-1)
        return torch.log(2 * _PI * s) * (-dim / 2) - size / (2 * s)

    def start(points: Any) -> Any:
        size = (points[:, :-1] ** 2).sum(-1)[:, None]
        return size * -0.5 - dim / 2 * math.log(2 * _PI)

    def residual(q: Any, points: Any) -> Any:
        gradient = q.grad
        drift = 0.5 * (points[:, :-1] * gradient).sum(-1)
        return q.t - dim / 2 - drift - q.laplacian - gradient.square().sum(-1)

    return Ready(
        domain,
        [Equation(residual), Dirichlet(exact)],
        soft=[Initial(exact)],
        hard=hard,
        wrap=wrap_by_distance(domain, lambda t: t, start),
        fields=("q",),
        exact=exact,
        name=f"Log Fokker–Planck {dim}+1D",
        equation=f"q_t = {dim}/2 + ½x·∇q + Δq + |∇q|²",
    )
