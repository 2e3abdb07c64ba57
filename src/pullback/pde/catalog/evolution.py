"""Equations in time: heat, waves, convection, Burgers, Schrödinger, Fokker–Planck."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..arguments import check_positive
from ..domains import Box, Interval, SpaceTime
from ..problem.conditions import Condition, Dirichlet, Equation, Initial, Periodic
from . import references
from .ready import Ready, bump, check_dim, check_number, distance, periodic, prefix

_PI = math.pi


def Heat(dim: int = 1, *, boundary_weight: float = 1.0, hard: bool = False) -> Ready:
    """u_t = ¼Δu on [0, 1]^d × [0, 1].

        d = 1   u* = e^(−π²t/4) sin πx, zero boundary; hard: u = sin πx + 4x(1 − x)t · N
        d ≥ 2   u* = e^(−t) Σ sin 2xᵢ on the boundary;  hard: u = Σ sin 2xᵢ + t · N

    For d ≥ 2 the boundary values stay in the loss. The weight is that of boundary and initial
    values.
    """  # fmt: skip
    check_dim("heat equation", dim)
    box = Box([(0, 1)] * dim)
    domain = SpaceTime(box, (0, 1))
    if dim == 1:

        def exact(points: Any) -> Any:
            return torch.exp(points[:, 1] * (-(_PI**2) / 4)) * torch.sin(_PI * points[:, 0])
    else:

        def exact(points: Any) -> Any:
            return torch.exp(-points[:, -1]) * torch.sin(2 * points[:, :-1]).sum(-1)

    def initial(points: Any) -> Any:
        waves = torch.sin(_PI * points[:, :1]) if dim == 1 else torch.sin(2 * points[:, :-1])
        return waves.sum(-1)[:, None]

    equation = Equation(lambda u: u.t - 0.25 * u.laplacian)
    boundary = Dirichlet(0.0 if dim == 1 else exact, weight=boundary_weight)
    soft: Sequence[Condition] = [] if dim == 1 else [boundary]
    edge = bump(box) if dim == 1 else lambda points: 1.0
    return Ready(
        domain,
        [equation, *soft] if hard else [equation, boundary, Initial(exact, weight=boundary_weight)],
        exact=exact,
        name=f"Heat {dim}+1D",
        equation="u_t = ¼Δu",
        hard=distance(domain, lambda points: points[:, -1:] * edge(points), initial)
        if hard
        else None,
    )


def Wave(
    speed: float = 2.0, time: float = 1.0, *, boundary_weight: float = 1.0, hard: bool = False
) -> Ready:
    """u_tt = c² u_xx on [0, 1] × [0, T], u = 0 on the boundary, at rest in the beginning.

    u* = sin πx cos cπt + ½ sin 4πx cos 4cπt. Hard: u = u*(x, 0) + 4x(1 − x)t² · N, which has
    the initial velocity 0. The weight is that of boundary and initial values.
    """
    c, time = check_positive("The speed", speed), check_positive("The time", time)
    space = Interval(0, 1)
    domain, edge = SpaceTime(space, (0, time)), bump(space)

    def start(x: Any) -> Any:
        return torch.sin(_PI * x) + 0.5 * torch.sin(4 * _PI * x)

    def exact(x: Any, t: Any) -> Any:
        slow = torch.sin(_PI * x) * torch.cos(c * _PI * t)
        return slow + 0.5 * torch.sin(4 * _PI * x) * torch.cos(4 * c * _PI * t)

    equation = Equation(lambda u: u.tt - c**2 * u.xx)
    soft: list[Condition] = [
        Dirichlet(0.0, weight=boundary_weight),
        Initial(start, velocity=0.0, weight=boundary_weight),
    ]
    return Ready(
        domain,
        [equation] if hard else [equation, *soft],
        exact=exact,
        name=f"Wave c={c:g}" + (f" t ≤ {time:g}" if time != 1 else ""),
        equation=f"u_tt = {prefix(c**2, ' ')}u_xx",
        hard=distance(domain, lambda points, t: t**2 * edge(points), start) if hard else None,
    )


def Convection(beta: float = 40.0, *, hard: bool = False) -> Ready:
    """u_t + βu_x = 0 on [0, 2π] × [0, 1], periodic, u(x, 0) = sin x; u* = sin(x − βt).

    Hard: u = sin x + t · N(sin x, cos x, t).
    """
    beta = check_number("speed", beta)
    domain = SpaceTime(Interval(0, 2 * _PI), (0, 1))

    def start(x: Any) -> Any:
        return torch.sin(x)

    equation = Equation(lambda u: u.t + beta * u.x)
    return Ready(
        domain,
        [equation] if hard else [equation, Periodic("x", 0), Initial(start)],
        exact=lambda x, t: torch.sin(x - beta * t),
        name=f"Convection β={beta:g}",
        equation=f"u_t + {prefix(beta, ' ')}u_x = 0",
        hard=periodic(domain, start, 2 * _PI) if hard else None,
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

    equation = Equation(lambda u: u.t + u * u.x - nu * u.xx)
    return Ready(
        domain,
        [equation] if hard else [equation, Dirichlet(0.0), Initial(start)],
        reference=references.Burgers(nu),
        name=f"Burgers ν={nu:.4g}",
        equation=f"u_t + u u_x = {prefix(nu, ' ')}u_xx",
        hard=distance(domain, lambda x, t: (1 - x**2) * t, start) if hard else None,
    )


def Schroedinger(*, initial_weight: float = 1.0, hard: bool = False) -> Ready:
    """i h_t + ½h_xx + |h|²h = 0 for h = u + iv on [−5, 5] × [0, π/2], h(x, 0) = 2 sech x.

    The breather of two solitons, even in x, with its own values at x = ±5:

        h* = 4e^(it/2) (cosh 3x + 3e^(4it) cosh x) / (cosh 4x + 4 cosh 2x + 3 cos 4t).

    Often it is posed periodic instead; that solution has kinks, as 2 sech x does at x = ±5. Hard:
    h = 2 sech x + h*(5, t) − h*(5, 0) + 4(1 − (x/5)²)t · N.
    """
    space = Interval(-5, 5)
    domain, edge = SpaceTime(space, (0, _PI / 2)), bump(space)

    def exact(x: Any, t: Any) -> Any:
        far, near = torch.cosh(3 * x), 3 * torch.cosh(x)
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

    conditions: list[Condition] = [Equation(residual)]
    for i, name in enumerate(() if hard else ("u", "v")):
        value = {"field": name, "weight": initial_weight}
        conditions += [
            Dirichlet(lambda x, t, i=i: exact(x, t)[i], **value, name=f"dirichlet {name}"),
            Initial(lambda x, t, i=i: exact(x, t)[i], **value, name=f"initial {name}"),
        ]
    return Ready(
        domain,
        conditions,
        fields=("u", "v"),
        exact=exact,
        name="Schrödinger 2 sech x",
        equation="i h_t + ½h_xx + |h|²h = 0, h = u + iv",
        hard=distance(domain, lambda points, t: t * edge(points), lift) if hard else None,
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

    conditions: list[Condition] = [Equation(residual), Dirichlet(exact)]
    return Ready(
        domain,
        conditions if hard else [*conditions, Initial(exact)],
        fields=("q",),
        exact=exact,
        name=f"Log Fokker–Planck {dim}+1D",
        equation=f"q_t = {dim}/2 + ½x·∇q + Δq + |∇q|²",
        hard=distance(domain, lambda t: t, start) if hard else None,
    )
