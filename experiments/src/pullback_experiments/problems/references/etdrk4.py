"""Exponential time differencing of fourth order for u_t = L u + N(u), L diagonal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import scipy

from .base import Array


class Coefficients(NamedTuple):
    """What one step of length h multiplies with, each of the shape of L."""

    full: Array
    half: Array
    stage: Array
    first: Array
    middle: Array
    last: Array


def coefficients(linear: Array, h: float) -> Coefficients:
    r"""e^{hL}, e^{hL/2} and the φ-functions of z = hL.

    The φ-functions cancel near z = 0, so they are means over a circle of radius 1 around z.
    Kassam and Trefethen, SIAM J. Sci. Comput. 26 (2005) 1214–1233.
    """
    nodes = 32  # on the circle
    z = h * linear
    angles = 2j * np.pi * (np.arange(nodes) + 0.5) / nodes
    c = z[..., None] + np.exp(angles)
    e = np.exp(c)

    def mean(values: Array) -> Array:
        coefficients = h * values.mean(axis=-1)
        if np.iscomplexobj(linear):
            return coefficients
        return coefficients.real

    return Coefficients(
        full=np.exp(z),
        half=np.exp(z / 2),
        stage=mean((np.exp(c / 2) - 1) / c),
        first=mean((-4 - c + e * (4 - 3 * c + c**2)) / c**3),
        middle=mean((2 + c + e * (c - 2)) / c**3),
        last=mean((-4 - 3 * c - c**2 + e * (4 - c)) / c**3),
    )


def step(v: Array, nonlinear: Callable[[Array], Array], k: Coefficients) -> Array:
    """v(t) ↦ v(t + h), error O(h⁵)."""
    nv = nonlinear(v)
    half = k.half * v
    a = half + k.stage * nv
    na = nonlinear(a)
    nb = nonlinear(half + k.stage * na)
    nc = nonlinear(k.half * a + k.stage * (2 * nb - nv))
    return k.full * v + k.first * nv + 2 * k.middle * (na + nb) + k.last * nc


class FourierTrajectory:
    r"""Fourier coefficients over time: u(x, t) = Re(c_0 + 2 Σ_{k≥1} c_k(t) e^{iπk(x+1)}).

    Time is cut into panels, edges (P+1,). In each the coefficients, (P, q+1, K), are a polynomial
    of degree q given at equally spaced nodes, the ends included.
    """

    def __init__(self, edges: Array, coefficients: Array) -> None:
        self.edges = edges
        self.coefficients = coefficients

    def __call__(self, x: Array, t: Array) -> Array:
        """u (N,) at the points (x, t), each (N,)."""
        u = np.empty(len(x))
        if not len(x):
            return u
        panel = np.clip(np.searchsorted(self.edges, t, "right") - 1, 0, len(self.edges) - 2)
        order = np.argsort(panel, kind="stable")
        starts = np.flatnonzero(np.diff(panel[order], prepend=-1))
        for members in np.split(order, starts[1:]):
            u[members] = self._panel(int(panel[members[0]]), x[members], t[members])
        return u

    def _panel(self, p: int, x: Array, t: Array) -> Array:
        low = self.edges[p]
        high = self.edges[p + 1]
        nodal = self.coefficients[p]
        at = scipy.interpolate.BarycentricInterpolator(np.linspace(low, high, len(nodal)), nodal)
        size = max(1, 2**21 // nodal.shape[1])
        starts = range(0, len(x), size)
        return np.concatenate([fourier_sum(at(t[i : i + size]), x[i : i + size]) for i in starts])


def fourier_sum(c: Array, x: Array) -> Array:
    """Re(c_0 + 2 Σ_{k≥1} c_k e^{iπk(x+1)}) for each row of c (N, K) at its x (N,).

    k = B·a + b, so that N(A + B) exponentials serve N·A·B terms.
    """
    n, k = c.shape
    block = max(1, int(np.sqrt(k)))
    blocks = -(-k // block)
    doubled = np.zeros((n, blocks * block), dtype=c.dtype)
    doubled[:, :k] = 2 * c
    doubled[:, 0] = c[:, 0]
    turn = 1j * np.pi * (x[:, None] + 1)
    fine = np.exp(turn * np.arange(block))
    coarse = np.exp(turn * (block * np.arange(blocks)))
    inner = doubled.reshape(n, blocks, block) @ fine[:, :, None]
    return (inner[:, :, 0] * coarse).sum(axis=1).real


def integrate(
    linear: Array,
    nonlinear: Callable[[Array], Array],
    start: Array,
    edges: Array,
    degree: int,
    longest: float,
) -> Array:
    """Coefficients (P, degree+1, …, K) at the nodes of each panel, in steps of at most `longest`.

    Between two nodes there are at least two steps.
    """
    v = start
    states = []
    for low, high in pairwise(edges):
        node = (high - low) / degree
        steps = max(2, int(np.ceil(node / longest - 1e-9)))
        k = coefficients(linear, node / steps)
        rows = [v]
        for _ in range(degree):
            for _ in range(steps):
                v = step(v, nonlinear, k)
            rows.append(v)
        states.append(np.stack(rows))
    return np.stack(states)
