"""Steady flow in a cavity whose lid moves smoothly."""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar

import numpy as np
import scipy
from numpy.polynomial import Polynomial, legendre

from pullback._core.errors import PullbackError
from pullback.pde.arguments import check_positive

from .base import Array, Reference, load_or_compute, relative, require_resolved


def shifted_vander(x: Array, degree: int) -> Array:
    """Legendre polynomials L_k(2x − 1) at x (N,), shape (N, degree+1)."""
    return legendre.legvander(2 * x - 1, degree)


def differentiate(c: Array, axis: int) -> Array:
    """Coefficients of the derivative in x ∈ [0, 1], padded to the same shape."""
    coefficients = 2 * legendre.legder(c, axis=axis)
    widths = [(0, c.shape[i] - coefficients.shape[i]) for i in range(c.ndim)]
    return np.pad(coefficients, widths)


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
        self.nodes = (nodes + 1) / 2
        weights = weights / 2
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

    def integrate_against_basis(self, fx: Array, fy: Array, fl: Array) -> Array:
        """∫ fx ∂xφ_ij + fy ∂yφ_ij + fl Δφ_ij, (M, M)."""
        wx = self.weights * fx
        wy = self.weights * fy
        wl = self.weights * fl
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
                rows = slice(i, None, 2)
                cols = slice(j, None, 2)
                mi = mass[rows, rows]
                mj = mass[cols, cols]
                ci = stiff[rows, rows]
                cj = stiff[cols, cols]
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
            block = rhs[rows, cols]
            a[rows, cols] = scipy.linalg.cho_solve(factor, block.ravel()).reshape(block.shape)
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


_LADDER = (400.0, 700.0)  # Reynolds numbers on the way to larger ones


class Cavity(Reference):
    r"""u·∇u + ∇p = Δu/Re, ∇·u = 0 on [0, 1]², u = (16x²(1−x)², 0) on y = 1, 0 elsewhere.

    Outputs (u, v, p), ∫p = 0. With u = (ψ_y, −ψ_x) and h = Δψ, for all clamped φ,

        (1/Re) ∫ h Δφ + ∫ h (ψ_y φ_x − ψ_x φ_y) = 0,

    by a Legendre–Galerkin method, Newton's method and GMRES, preconditioned by the biharmonic
    operator. Newton's method begins with the Stokes flow, or with that of a smaller Re.
    """

    domain = ((0.0, 1.0), (0.0, 1.0))
    outputs = 3
    version: ClassVar[int] = 2
    degrees: ClassVar[tuple[int, int]] = (84, 60)
    """Polynomial degrees of the solution and of the coarser one it is compared with."""

    def __init__(self, reynolds: float = 100.0) -> None:
        self.reynolds = check_positive("reynolds", reynolds)
        largest = 1000.0
        if reynolds > largest:
            raise PullbackError(
                f"There is no reference for reynolds={reynolds}",
                "Newton's method is not reliable there",
                f"Choose reynolds ≤ {largest:g}",
            )

    def values(self, points: Array) -> Array:
        chunk = 8192  # points at a time, for memory
        fields = [
            self._at(points[i : i + chunk], self._arrays["psi"], self._arrays["head"])
            for i in range(0, len(points), chunk)
        ]
        return np.concatenate([np.zeros((0, 3)), *fields])

    @property
    def accuracy(self) -> float:
        return float(self._arrays["accuracy"])

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        parameters = {"reynolds": self.reynolds, "degree": self.degrees[0]}
        keys = ("psi", "head", "accuracy")
        return load_or_compute("cavity", parameters, self.version, keys, self._compute)

    def _compute(self) -> dict[str, Array]:
        fine, coarse = (self.solve(degree) for degree in self.degrees)
        probe = np.random.default_rng(0).random((8192, 2))
        error = relative(self._at(probe, *coarse), self._at(probe, *fine))
        require_resolved(error, f"Cavity with reynolds={self.reynolds}")
        return {"psi": fine[0], "head": fine[1], "accuracy": np.array(error)}

    def _at(self, points: Array, psi: Array, head: Array) -> Array:
        """(u, v, p) (N, 3) from the coefficients of ψ and of p + ½|u|²."""
        x, y = points.T
        vx, vy = (shifted_vander(s, len(psi) - 1) for s in (x, y))
        u = ((vx @ differentiate(psi, 1)) * vy).sum(axis=1)
        v = -((vx @ differentiate(psi, 0)) * vy).sum(axis=1)
        p = ((vx @ head) * vy).sum(axis=1)
        return np.stack([u, v, p - 0.5 * (u * u + v * v)], axis=1)

    def solve(self, degree: int) -> tuple[Array, Array]:
        """Coefficients of ψ and of p + ½|u|², each (n+1, n+1)."""
        space = Clamped(degree)
        start = None
        for reynolds in (r for r in _LADDER if r < self.reynolds):
            start = _Newton(space, reynolds).run(start)
        newton = _Newton(space, self.reynolds)
        return newton.potentials(newton.run(start))


class _Newton:
    """Unknowns a (M, M): ψ = lift + Σ a_ij φ_i φ_j."""

    def __init__(self, space: Clamped, reynolds: float) -> None:
        self.space = space
        self.nu = 1 / reynolds
        self.lift = _boundary(space.degree)
        self.vander = shifted_vander(space.nodes, space.degree)
        dx = differentiate(self.lift, 0)
        dy = differentiate(self.lift, 1)
        bending = self.field(differentiate(dx, 0) + differentiate(dy, 1))
        self.base = self.field(dx), self.field(dy), bending
        zero = np.zeros_like(bending)
        self.load = self.nu * space.integrate_against_basis(zero, zero, bending)

    def field(self, c: Array) -> Array:
        """Values (Q, Q) from Legendre coefficients."""
        return self.vander @ c @ self.vander.T

    def run(self, start: Array | None = None) -> Array:
        """The unknowns, by Newton's method from these, or from the Stokes flow."""
        if start is None:
            a = self.space.biharmonic(-self.load / self.nu)
        else:
            a = start
        residual, fields = self.residual(a)
        for _ in range(20):
            if np.linalg.norm(residual) <= 1e-12 * np.linalg.norm(self.load):
                return a
            a = self.improve(a, residual, fields)
            residual, fields = self.residual(a)
        raise PullbackError(
            f"The cavity flow at reynolds={1 / self.nu:g} was not found",
            "Newton's method did not converge",
            "Choose a smaller reynolds",
        )

    def potentials(self, a: Array) -> tuple[Array, Array]:
        """Coefficients of ψ and of p + ½|u|²."""
        psi = self.lift + self.space.basis @ a @ self.space.basis.T
        return psi, self.head(psi, self.residual(a)[1])

    def residual(self, a: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        dx, dy, h = (f + g for f, g in zip(self.space.fields(a), self.base, strict=True))
        moved = self.space.integrate_against_basis(h * dy, -h * dx, np.zeros_like(h))
        return self.load + self.nu * self._stiff(a) + moved, (dx, dy, h)

    def _stiff(self, a: Array) -> Array:
        h = self.space.fields(a)[2]
        return self.space.integrate_against_basis(np.zeros_like(h), np.zeros_like(h), h)

    def improve(self, a: Array, residual: Array, fields: tuple[Array, Array, Array]) -> Array:
        """a − (derivative of the residual)⁻¹ residual; GMRES on (1/Re)⁻¹ biharmonic⁻¹ of both."""
        dx, dy, h = fields
        shape = a.shape
        zero = np.zeros_like(h)

        def apply(flat: Array) -> Array:
            d = flat.reshape(shape)
            ex, ey, eh = self.space.fields(d)
            moved = self.space.integrate_against_basis(eh * dy + h * ey, -eh * dx - h * ex, zero)
            return (d + self.space.biharmonic(moved) / self.nu).ravel()

        rhs = self.space.biharmonic(residual).ravel() / self.nu
        operator = scipy.sparse.linalg.LinearOperator(
            (rhs.size, rhs.size), matvec=apply, dtype=np.float64
        )
        move, _ = scipy.sparse.linalg.gmres(operator, rhs, rtol=1e-6, restart=150, maxiter=2)
        return a - move.reshape(shape)

    def head(self, psi: Array, fields: tuple[Array, Array, Array]) -> Array:
        """H with ∇H = νΔu − ω × u = ν(h_y, −h_x) + h(ψ_x, ψ_y), and p = H − ½|u|² of mean zero."""
        dx, dy, h = fields
        laplacian = differentiate(differentiate(psi, 0), 0) + differentiate(
            differentiate(psi, 1), 1
        )
        fx = self.nu * self.field(differentiate(laplacian, 1)) + h * dx
        fy = -self.nu * self.field(differentiate(laplacian, 0)) + h * dy
        head = self.space.potential(fx, fy)
        head[0, 0] = (self.space.weights * 0.5 * (dx**2 + dy**2)).sum()
        return head


def _boundary(degree: int) -> Array:
    """16x²(1−x)²·y²(y−1), which has ψ = 0 and ψ_n = 0 on all sides but ψ_y = 16x²(1−x)² on the lid.

    Its Legendre coefficients, (n+1, n+1).
    """
    along, upward = (
        Polynomial(c).convert(kind=legendre.Legendre, domain=[0, 1]).coef
        for c in ([0, 0, 16, -32, 16], [0, 0, -1, 1])
    )
    return np.pad(np.outer(along, upward), ((0, degree - 4), (0, degree - 3)))
