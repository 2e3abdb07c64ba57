"""Legendre–Galerkin tools for a clamped biharmonic problem on the unit square."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import scipy
from numpy.polynomial import legendre

from .base import Array


def shifted_vander(x: Array, degree: int) -> Array:
    """Legendre polynomials L_k(2x − 1) at x (N,), shape (N, degree+1)."""
    return legendre.legvander(2 * x - 1, degree)


def differentiate(c: Array, axis: int) -> Array:
    """Coefficients of the derivative in x ∈ [0, 1], padded to the same shape."""
    found = 2 * legendre.legder(c, axis=axis)
    widths = [(0, c.shape[i] - found.shape[i]) for i in range(c.ndim)]
    return np.pad(found, widths)


class Clamped:
    r"""Polynomials φ_i(x) φ_j(y) of degree ≤ n with φ = φ' = 0 at 0 and 1, and quadrature.

    φ_k ∝ L_k − 2(2k+5)/(2k+7) L_{k+2} + (2k+3)/(2k+7) L_{k+4}, scaled so that
    (φ_k'', φ_j'') = δ_kj. Jie Shen, SIAM J. Sci. Comput. 15 (1994) 1489–1505.
    """

    def __init__(self, degree: int) -> None:
        self.degree = degree
        k = np.arange(degree - 3)
        # 2^{3/2}: two derivatives of 2x − 1 and its Jacobian
        scale = 1 / np.sqrt(2 * (2 * k + 3.0) ** 2 * (2 * k + 5)) / 2**1.5
        self.basis = np.zeros((degree + 1, degree - 3))  # Legendre coefficients of φ_k
        self.basis[k, k] = scale
        self.basis[k + 2, k] = -2 * (2 * k + 5) / (2 * k + 7) * scale
        self.basis[k + 4, k] = (2 * k + 3) / (2 * k + 7) * scale
        nodes, weights = legendre.leggauss(math.ceil(1.75 * degree) + 4)
        self.nodes, weights = (nodes + 1) / 2, weights / 2
        self.weights = np.outer(weights, weights)  # (Q, Q)
        vander = shifted_vander(self.nodes, degree)
        self.b0 = vander @ self.basis  # (Q, M)
        self.b1 = vander @ differentiate(self.basis, 0)
        self.b2 = vander @ differentiate(differentiate(self.basis, 0), 0)
        self.line_weights = weights

    def fields(self, a: Array) -> tuple[Array, Array, Array]:
        """ψ_x, ψ_y and Δψ at the quadrature points for ψ = Σ a_ij φ_i φ_j, each (Q, Q)."""
        dx = self.b1 @ a @ self.b0.T
        dy = self.b0 @ a @ self.b1.T
        return dx, dy, self.b2 @ a @ self.b0.T + self.b0 @ a @ self.b2.T

    def tested(self, fx: Array, fy: Array, fl: Array) -> Array:
        """∫ fx ∂xφ_ij + fy ∂yφ_ij + fl Δφ_ij, (M, M)."""
        wx, wy, wl = self.weights * fx, self.weights * fy, self.weights * fl
        return (
            (self.b1.T @ wx + self.b2.T @ wl) @ self.b0
            + self.b0.T @ wy @ self.b1
            + self.b0.T @ wl @ self.b2
        )

    @cached_property
    def _blocks(self) -> list[tuple[slice, slice, tuple[Array, bool]]]:
        """Cholesky factors of (Δφ, Δφ): four blocks, as even and odd polynomials are orthogonal."""
        weighted = self.line_weights[:, None] * self.b0
        mass = self.b0.T @ weighted
        stiff = self.b1.T @ (self.line_weights[:, None] * self.b1)
        blocks = []
        for i in (0, 1):
            for j in (0, 1):
                rows, cols = slice(i, None, 2), slice(j, None, 2)
                mi, mj = mass[rows, rows], mass[cols, cols]
                ci, cj = stiff[rows, rows], stiff[cols, cols]
                matrix = (
                    np.kron(np.eye(len(mi)), mj)
                    + 2 * np.kron(ci, cj)
                    + np.kron(mi, np.eye(len(mj)))
                )
                blocks.append((rows, cols, scipy.linalg.cho_factor(matrix)))
        return blocks

    def biharmonic(self, rhs: Array) -> Array:
        """The a (M, M) with (Δψ, Δφ_ij) = rhs_ij for all i, j."""
        a = np.empty_like(rhs)
        for rows, cols, factor in self._blocks:
            part = rhs[rows, cols]
            a[rows, cols] = scipy.linalg.cho_solve(factor, part.ravel()).reshape(part.shape)
        return a

    def potential(self, fx: Array, fy: Array) -> Array:
        """Legendre coefficients of the H of mean zero with ∫|∇H − f|² least, (n+1, n+1)."""
        vander = shifted_vander(self.nodes, self.degree)
        slope = vander @ differentiate(np.eye(self.degree + 1), 0)
        rhs = slope.T @ (self.weights * fx) @ vander + vander.T @ (self.weights * fy) @ slope
        stiff = slope.T @ (self.line_weights[:, None] * slope)
        mass = np.diag(1 / (2 * np.arange(self.degree + 1) + 1.0))
        values, vectors = scipy.linalg.eigh(stiff, mass)
        total = values[:, None] + values[None, :]
        inverse = np.where(total > 1e-9, 1 / np.where(total > 1e-9, total, 1.0), 0.0)
        h = vectors @ (inverse * (vectors.T @ rhs @ vectors)) @ vectors.T
        h[0, 0] = 0.0
        return h


def hermite(degree: int) -> Array:
    """Legendre coefficients of the cubics dual to (f(0), f'(0), f(1), f'(1)), (4, degree+1)."""
    duality = ends(np.eye(4))  # (4, 4): functional i of L_j
    return np.pad(np.linalg.inv(duality).T, ((0, 0), (0, degree - 3)))


def ends(c: Array) -> Array:
    """f(0), f'(0), f(1), f'(1) from Legendre coefficients along the last axis, (4, ...)."""
    k = np.arange(c.shape[-1])
    sign = (-1.0) ** k
    slope = k * (k + 1.0)
    return np.stack([c @ sign, -(c @ (sign * slope)), c @ np.ones(len(k)), c @ slope])


def lift(vertical: Array, horizontal: Array) -> Array:
    """A polynomial with given values and normal derivatives on the four sides, (n+1, n+1).

    vertical: Legendre coefficients in y of ψ, ψ_x at x = 0 and at x = 1, (4, n+1); horizontal:
    those in x of ψ, ψ_y at y = 0 and at y = 1. They have to agree at the corners. Blended
    by Hermite cubics: P_x + P_y − P_x P_y.
    """
    h = hermite(vertical.shape[1] - 1)
    corners = ends(horizontal)  # (4, 4): functional i in x of side j
    return h.T @ vertical + horizontal.T @ h - h.T @ corners @ h


def interpolate(values: Array) -> Array:
    """Legendre coefficients (..., n+1) of the polynomial through values at `points(n)`."""
    n = values.shape[-1] - 1
    return np.linalg.solve(shifted_vander(points(n), n), values.T).T


def points(n: int) -> Array:
    """n + 1 Gauss–Legendre nodes of [0, 1]."""
    return (legendre.leggauss(n + 1)[0] + 1) / 2
