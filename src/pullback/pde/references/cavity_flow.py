"""Steady flow in a cavity whose lid moves smoothly."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import numpy as np
import scipy

from ..._core.errors import PullbackError
from ..kinds import check_positive
from .base import Array, Reference, relative, resolved
from .cache import cached
from .galerkin import Clamped, differentiate, interpolate, lift, points, shifted_vander

_CHUNK = 8192
_LARGEST = 1000.0  # Reynolds number
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
        if reynolds > _LARGEST:
            raise PullbackError(
                f"There is no reference for reynolds={reynolds}",
                "Newton's method is not reliable there",
                f"Choose reynolds ≤ {_LARGEST:g}",
            )

    def values(self, points: Array) -> Array:
        parts = [
            self._at(points[i : i + _CHUNK], self._arrays["psi"], self._arrays["head"])
            for i in range(0, len(points), _CHUNK)
        ]
        return np.concatenate([np.zeros((0, 3)), *parts])

    @property
    def accuracy(self) -> float:
        return float(self._arrays["accuracy"])

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        parameters = {"reynolds": self.reynolds, "degree": self.degrees[0]}
        keys = ("psi", "head", "accuracy")
        return cached("cavity", parameters, self.version, keys, self._compute)

    def _compute(self) -> dict[str, Array]:
        fine, coarse = (self.solve(degree) for degree in self.degrees)
        probe = np.random.default_rng(0).random((8192, 2))
        error = relative(self._at(probe, *coarse), self._at(probe, *fine))
        resolved(error, f"Cavity with reynolds={self.reynolds}")
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
        space, start = Clamped(degree), None
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
        dx, dy = differentiate(self.lift, 0), differentiate(self.lift, 1)
        bending = self.field(differentiate(dx, 0) + differentiate(dy, 1))
        self.base = self.field(dx), self.field(dy), bending
        zero = np.zeros_like(bending)
        self.load = self.nu * space.tested(zero, zero, bending)

    def field(self, c: Array) -> Array:
        """Values (Q, Q) from Legendre coefficients."""
        return self.vander @ c @ self.vander.T

    def run(self, start: Array | None = None) -> Array:
        """The unknowns, by Newton's method from these, or from the Stokes flow."""
        a = self.space.biharmonic(-self.load / self.nu) if start is None else start
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
        moved = self.space.tested(h * dy, -h * dx, np.zeros_like(h))
        return self.load + self.nu * self._stiff(a) + moved, (dx, dy, h)

    def _stiff(self, a: Array) -> Array:
        h = self.space.fields(a)[2]
        return self.space.tested(np.zeros_like(h), np.zeros_like(h), h)

    def improve(self, a: Array, residual: Array, fields: tuple[Array, Array, Array]) -> Array:
        """a − (derivative of the residual)⁻¹ residual; GMRES on (1/Re)⁻¹ biharmonic⁻¹ of both."""
        dx, dy, h = fields
        shape, zero = a.shape, np.zeros_like(h)

        def apply(flat: Array) -> Array:
            d = flat.reshape(shape)
            ex, ey, eh = self.space.fields(d)
            moved = self.space.tested(eh * dy + h * ey, -eh * dx - h * ex, zero)
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
        own = differentiate(differentiate(psi, 0), 0) + differentiate(differentiate(psi, 1), 1)
        fx = self.nu * self.field(differentiate(own, 1)) + h * dx
        fy = -self.nu * self.field(differentiate(own, 0)) + h * dy
        head = self.space.potential(fx, fy)
        head[0, 0] = (self.space.weights * 0.5 * (dx**2 + dy**2)).sum()
        return head


def _boundary(degree: int) -> Array:
    """ψ = 0 on all sides and ψ_y = 16x²(1−x)² on the lid, extended: Legendre (n+1, n+1)."""
    s = points(degree)
    zero = np.zeros_like(s)
    sides = np.stack([zero, zero, zero, zero])
    lid = np.stack([zero, zero, zero, 16 * s**2 * (1 - s) ** 2])
    return lift(interpolate(sides), interpolate(lid))
