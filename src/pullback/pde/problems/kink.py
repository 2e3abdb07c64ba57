r"""The heat equation's smoothing of a periodic kink, for networks that must start from one."""

from __future__ import annotations

import math
from typing import Any

import torch

_NEAR = 0.2  # how far from the ends the damped part reaches
_TINY = 1e-30  # keeps t = 0 finite: a layer of width 1e-15


def start(x: Any, t: Any, diffusion: float, decay: float = 0.0) -> Any:
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
    width = torch.sqrt(4 * diffusion * t + _TINY)
    first, third, same = 0.0, 0.0, 0.0
    for gap in (1 - x, 1 + x):
        one, three = _iterated(gap / width)
        first, third = first + one, third + three
        kinks = 2 * gap + (2 / _NEAR**2 - math.pi**2) * gap**3
        same = same + kinks * torch.exp(-(gap**2) / _NEAR**2)
    smooth = x**2 * torch.cos(math.pi * x)
    cubic = 6 * width**3 * third - 3 * diffusion * t * x**2
    layer = same + 2 * width * first - math.pi**2 * cubic
    return smooth - same + torch.exp(-decay * t) * layer


def _iterated(z: Any) -> tuple[Any, Any]:
    """ierfc and i³erfc, by 2n·iⁿerfc = iⁿ⁻²erfc − 2z·iⁿ⁻¹erfc from (2/√π)e^(−z²) and erfc."""
    bell, zero = torch.exp(-(z**2)) * (2 / math.sqrt(math.pi)), 1 - torch.erf(z)
    one = 0.5 * bell - z * zero
    two = 0.25 * zero - 0.5 * z * one
    return one, (one - 2 * z * two) / 6
