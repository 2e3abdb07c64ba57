"""Periodic equations in one space dimension: waves, fronts, chaos and pulses."""

from __future__ import annotations

import math
from typing import Any

import torch

from pullback.pde import Equation, Initial, Interval, Periodic, Ready, SpaceTime
from pullback.pde.arguments import check_positive
from pullback.pde.catalog.ready import check_number, prefix, wrap_periodically

from . import references

_PI = math.pi


def AllenCahn(diffusion: float = 1e-4, reaction: float = 5.0, *, hard: bool = False) -> Ready:
    """u_t = D u_xx + ρ(u − u³) on [−1, 1] × [0, 1], periodic, u(x, 0) = x² cos πx.

    Compared with a Fourier solution. Hard: u = u₀ + t · N(sin πx, cos πx, t), where u₀ is the
    initial value whose kink at x = ±1 the heat equation smooths as time goes on, damped by the
    reaction's slope −2ρ at u = −1.
    """
    d = check_positive("The diffusion", diffusion)
    rho = check_positive("The reaction", reaction)
    domain = SpaceTime(Interval(-1, 1), (0, 1))
    equation = Equation(lambda u: u.t - d * u.xx - rho * (u - u**3))
    soft = [Periodic("x", 1), Initial(lambda x: x**2 * torch.cos(_PI * x))]
    return Ready(
        domain,
        [equation],
        soft=soft,
        hard=hard,
        wrap=wrap_periodically(domain, lambda x, t: smoothed_kink(x, t, d, 2 * rho), 2.0),
        reference=references.AllenCahn(d, rho),
        name=f"Allen–Cahn D={d:g} ρ={rho:g}",
        equation=f"u_t = {d:g} u_xx + {prefix(rho)}(u − u³)",
    )


def KdV(
    eta: float = 1.0, mu: float = 0.022, *, initial_weight: float = 1.0, hard: bool = False
) -> Ready:
    """u_t + ηuu_x + μ²u_xxx = 0 on [−1, 1] × [0, 1], periodic, u(x, 0) = cos πx.

    Compared with a Fourier solution. Hard: u = cos πx + t · N(sin πx, cos πx, t).
    """
    eta = check_number("coefficient η", eta)
    mu = check_number("coefficient μ", mu)
    domain = SpaceTime(Interval(-1, 1), (0, 1))

    def start(x: Any) -> Any:
        return torch.cos(_PI * x)

    equation = Equation(lambda u: u.t + eta * u * u.x + mu**2 * u.xxx)
    first = Initial(start, weight=initial_weight)
    return Ready(
        domain,
        [equation],
        soft=[Periodic("x", 2), first],
        hard=hard,
        wrap=wrap_periodically(domain, start, 2.0),
        reference=references.KortewegDeVries(eta, mu),
        name=f"KdV η={eta:g} μ={mu:g}",
        equation=f"u_t + {prefix(eta, ' ')}u u_x + {mu:g}² u_xxx = 0",
    )


def KuramotoSivashinsky(time: float = 0.5, *, initial_weight: float = 1.0) -> Ready:
    """u_t + 100ε uu_x + 100ε² u_xx + 100ε⁴ u_xxxx = 0 on [0, 2π], periodic, ε = 1/16.

    From u(x, 0) = cos x (1 + sin x) up to t = `time` ≤ 1. Chaotic: errors of one time grow later.
    Compared with a Fourier solution. The solution is odd about x = π/2.
    """
    reference = references.KuramotoSivashinsky(check_positive("The time", time))
    a = 100 / 16
    b = 100 / 16**2
    c = 100 / 16**4
    start = Initial(lambda x: torch.cos(x) * (1 + torch.sin(x)), weight=initial_weight)
    return Ready(
        SpaceTime(Interval(0, 2 * _PI), (0, time)),
        [Equation(lambda u: u.t + a * u * u.x + b * u.xx + c * u.xxxx), Periodic("x", 3), start],
        reference=reference,
        name=f"Kuramoto–Sivashinsky t ≤ {time:g}",
        equation="u_t + 100ε uu_x + 100ε² u_xx + 100ε⁴ u_xxxx = 0, ε = 1/16",
    )


def GrayScott(diffusion: float = 0.2, time: float = 0.5, *, initial_weight: float = 1.0) -> Ready:
    """u_t = D u_xx + 40(1 − u) − 1000uv², v_t = ½D v_xx − 100v + 1000uv² on [−1, 1], periodic.

    From u = 1 − ½b, v = ¼b, b = e^{−10(1 − cos πx)}: the pulse of v splits, and splits again.
    Compared with a Fourier solution. Both fields are even in x.
    """
    d = check_positive("The diffusion", diffusion)
    time = check_positive("The time", time)

    def bump(x: Any) -> Any:
        return torch.exp(-10 * (1 - torch.cos(_PI * x)))

    def residual(u: Any, v: Any) -> Any:
        reaction = 1000 * u * v**2
        return (
            u.t - d * u.xx - 40 * (1 - u) + reaction,
            v.t - 0.5 * d * v.xx + 100 * v - reaction,
        )

    return Ready(
        SpaceTime(Interval(-1, 1), (0, time)),
        [
            Equation(residual),
            Periodic("x", 1, field="u", name="periodic u"),
            Periodic("x", 1, field="v", name="periodic v"),
            Initial(
                lambda x: 1 - 0.5 * bump(x), field="u", weight=initial_weight, name="initial u"
            ),
            Initial(lambda x: 0.25 * bump(x), field="v", weight=initial_weight, name="initial v"),
        ],
        fields=("u", "v"),
        reference=references.GrayScott(d, time),
        name=f"Gray–Scott D={d:g} t ≤ {time:g}",
        equation=f"u_t = {d:g} u_xx + 40(1 − u) − 1000uv², v_t = {d / 2:g} v_xx − 100v + 1000uv²",
    )


def smoothed_kink(x: Any, t: Any, diffusion: float, decay: float = 0.0) -> Any:
    r"""x² cos πx at t = 0, and three times continuously differentiable across x = ±1 after it.

    The periodic x² cos πx is −1 + 2|ξ| − π²|ξ|³ + smooth terms, ξ the distance from x = ±1. An
    equation with u_xx smooths these kinks at once, and a smooth network cannot take them away:
    built in as they are, they would stay. So with τ = Dt, z = ξ/√(4τ) and the sum over both ends,

        x² cos πx + Σ 2√(4τ) ierfc(z) − π² (Σ 6 (4τ)^{3/2} i³erfc(z) − 3τx²),

    where 2√(4τ) ierfc(z) has slope −2 at ξ = 0⁺, and 6(4τ)^{3/2} i³erfc(z) the third
    derivative −6 and the slope −6τ, which 3τx² takes back. Images farther away than these are
    e^(−1/τ) and left out.

    A reaction with slope −decay there damps what is smoothed: where S solves the heat equation,
    e^(−decay·t)·S solves S_t = DS_xx − decay·S. So that part is damped, together with what has
    the same kinks and stays near the ends: K = Σ (2ξ + (2/δ² − π²)ξ³) e^(−ξ²/δ²).
    """
    near = 0.2  # δ: how far from the ends the damped part reaches
    width = torch.sqrt(4 * diffusion * t + 1e-30)  # a layer of width 1e-15 keeps t = 0 finite
    first = 0.0
    third = 0.0
    shift = 0.0
    for gap in (1 - x, 1 + x):
        one, three = _integrate_erfc(gap / width)
        first = first + one
        third = third + three
        kinks = 2 * gap + (2 / near**2 - math.pi**2) * gap**3
        shift = shift + kinks * torch.exp(-(gap**2) / near**2)
    smooth = x**2 * torch.cos(math.pi * x)
    cubic = 6 * width**3 * third - 3 * diffusion * t * x**2
    layer = shift + 2 * width * first - math.pi**2 * cubic
    return smooth - shift + torch.exp(-decay * t) * layer


def _integrate_erfc(z: Any) -> tuple[Any, Any]:
    """ierfc and i³erfc, by 2n·iⁿerfc = iⁿ⁻²erfc − 2z·iⁿ⁻¹erfc from (2/√π)e^(−z²) and erfc."""
    bell = torch.exp(-(z**2)) * (2 / math.sqrt(math.pi))
    zero = 1 - torch.erf(z)
    one = 0.5 * bell - z * zero
    two = 0.25 * zero - 0.5 * z * one
    return one, (one - 2 * z * two) / 6
