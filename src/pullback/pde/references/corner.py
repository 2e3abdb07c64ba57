"""The flow in the two corners where a moving lid meets resting walls."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.polynomial import Polynomial

from .base import Array

_C = 4 / (math.pi**2 - 4)
_D = 2 * math.pi / (math.pi**2 - 4)
_B = -(math.pi**2) / (math.pi**2 - 4)


class Corner(NamedTuple):
    """Each shaped like the points; h = Δψ, index 1 is the Stokes part, 2 the inertial one."""

    psi: Array
    dx: Array
    dy: Array
    laplacian: Array
    """h1 + h2."""
    bent: Array
    """h2: the part of h that is not harmonic."""
    head: Array
    """p + ½|u|²."""
    own_x: Array
    """h1 ∂xψ1, which `head` accounts for."""
    own_y: Array
    """h1 ∂yψ1."""


class Trigonometric(NamedTuple):
    """a(θ) + b(θ) cos 2θ + c(θ) sin 2θ with polynomials a, b, c."""

    plain: Polynomial
    cos: Polynomial
    sin: Polynomial

    def __call__(self, theta: Array) -> Array:
        cos, sin = np.cos(2 * theta), np.sin(2 * theta)
        return self.plain(theta) + self.cos(theta) * cos + self.sin(theta) * sin

    def derivative(self) -> Trigonometric:
        cos, sin = self.cos.deriv() + 2 * self.sin, self.sin.deriv() - 2 * self.cos
        return Trigonometric(self.plain.deriv(), cos, sin)

    def integral(self) -> Trigonometric:
        """∫_0^θ."""
        cos, sin = Polynomial([0.0]), Polynomial([0.0])
        for _ in range(6):  # b' + 2c and c' − 2b are given: exact once the degrees are used up
            cos, sin = 0.5 * (sin.deriv() - self.sin), 0.5 * (self.cos - cos.deriv())
        return Trigonometric(self.plain.integ() - cos(0.0), cos, sin)


def _inertia() -> tuple[Trigonometric, Trigonometric, float]:
    r"""g, E and κ of the flow's next order in r: ψ2 = Re r² g(θ), head −κ log r + E(θ).

    With ψ1 = r f(θ) and q = f + f'': Δ²ψ2 = Re (∂yψ1 ∂xh1 − ∂xψ1 ∂yh1) is g'''' + 4g'' = (fq)',
    g and g' zero at both ends. So k = g' has k'' + 4k = fq + κ, and E' = q f'.
    """
    p, s = 2 * _C * _D, _D**2 - _C**2  # fq = −bc + bc cos + bd sin + θ(p cos + s sin), of 2θ
    cos = Polynomial([0.0, -_B * _D / 4 + p / 16, -s / 8])
    sin = Polynomial([0.0, _B * _C / 4 + s / 16, p / 8])
    zero, one = Polynomial([0.0]), Polynomial([1.0])
    particular = Trigonometric(zero, cos, sin)
    free = (
        Trigonometric(one, zero, zero),
        Trigonometric(zero, one, zero),
        Trigonometric(zero, zero, one),
    )
    end = np.array(math.pi / 2)
    matrix = [[f(0 * end), f(end), f.integral()(end)] for f in free]
    target = [-particular(0 * end), -particular(end), -particular.integral()(end)]
    c = np.linalg.solve(np.array(matrix).T, np.array(target))
    slope = Trigonometric(zero + c[0], cos + c[1], sin + c[2])
    swirl = Trigonometric(
        Polynomial([-_D - _C * _D, _D**2 + _C**2]),
        Polynomial([-_D + _C * _D, s]),
        Polynomial([_D**2 + _C, -p]),
    )
    return slope.integral(), swirl.integral(), 4 * float(c[0]) + _B * _C


_G, _E, _KAPPA = _inertia()
_G1 = _G.derivative()
_G2 = _G1.derivative()


def left(x: Array, y: Array, reynolds: float) -> Corner:
    r"""ψ = bY + θ(cX + dY) + Re r² g(θ) with X = x = r cos θ, Y = 1 − y = r sin θ.

    u = (ψ_y, −ψ_x) = (1, 0) on the lid Y = 0 and (0, 0) on the wall X = 0. The Stokes part
    (G. I. Taylor, 1962) has b = −π²/(π²−4), c = 4/(π²−4), d = 2π/(π²−4): its velocity is
    homogeneous of degree 0 in r, its vorticity and pressure of degree −1. Inertia adds one degree;
    the flow less both is of degree 2. Botella and Peyret, Computers & Fluids 27 (1998) 421–433.
    """
    big_x, big_y = x, 1 - y
    square = big_x**2 + big_y**2
    apex = square == 0
    square = np.where(apex, 1.0, square)
    theta = np.arctan2(big_y, big_x)  # 0 at the apex: the lid wins
    g, slope = _G(theta), _G1(theta)
    line = _C * big_x + _D * big_y
    h1 = 2 * (_D * big_x - _C * big_y) / square
    h2 = reynolds * (4 * g + _G2(theta))
    dx1 = _C * theta - line * big_y / square
    dy1 = -(_B + _D * theta + np.where(apex, _C, line * big_x / square))
    stokes = np.where(apex, -np.inf, -2 * line / square)
    return Corner(
        psi=_B * big_y + theta * line + reynolds * square * g,
        dx=dx1 + reynolds * (2 * big_x * g - big_y * slope),
        dy=dy1 - reynolds * (2 * big_y * g + big_x * slope),
        laplacian=h1 + h2,
        bent=h2,
        head=stokes / reynolds - 0.5 * _KAPPA * np.log(square) + _E(theta),
        own_x=h1 * dx1,
        own_y=h1 * dy1,
    )


def right(x: Array, y: Array, reynolds: float) -> Corner:
    """The mirror image at x = 1/2 of `left` with the lid, and so the Reynolds number, reversed."""
    mirrored = left(1 - x, y, -reynolds)
    return mirrored._replace(dx=-mirrored.dx, own_x=-mirrored.own_x)


def both(x: Array, y: Array, reynolds: float) -> Corner:
    """The sum of the two corners."""
    pairs = zip(left(x, y, reynolds), right(x, y, reynolds), strict=True)
    return Corner(*(a + b for a, b in pairs))


def none(x: Array, y: Array, reynolds: float) -> Corner:
    """No singular part."""
    return Corner(*(np.zeros(np.broadcast_shapes(x.shape, y.shape)) for _ in Corner._fields))
