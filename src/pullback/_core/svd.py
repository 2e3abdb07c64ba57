r"""Thin singular value decompositions A = U Σ Vᵀ that are fast for tall, wide and CUDA matrices.

A tall A (or Aᵀ, if A is wide) is first reduced to the triangle of A = QR; U = Q U_R is not
multiplied out, since products with it are all that is wanted. On CUDA, where the usual SVD is slow,
the triangle is decomposed through its polar factors R = W H: the eigenvalues of the positive
semidefinite H are the singular values themselves and not their squares, so that eigh(H) = V Σ Vᵀ,
U_R = W V is as accurate as an SVD (Nakatsukasa and Higham, 2013).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

_REDUCE = 1.2  # the ratio of the sides from which a QR before the SVD pays
_SMALL = 2**14  # entries up to which one call of LAPACK is fastest


@dataclass(frozen=True)
class Svd:
    """A = U Σ Vᵀ with σ in decreasing order; `q` multiplies u (A tall) or v (A wide) if given."""

    u: Tensor
    sigma: Tensor
    v: Tensor
    q: Orthonormal | None = None
    wide: bool = False

    def left(self, r: Tensor) -> Tensor:
        """Uᵀr: (n,) -> (k,)."""
        return self.u.T @ (r if self.q is None or self.wide else self.q.transposed(r))

    def right(self, g: Tensor) -> Tensor:
        """Vᵀg: (p,) -> (k,)."""
        return self.v.T @ (self.q.transposed(g) if self.q is not None and self.wide else g)

    def combine(self, c: Tensor) -> Tensor:
        """V c along the last axis: (..., k) -> (..., p)."""
        x = c @ self.v.T
        return self.q.applied(x) if self.q is not None and self.wide else x

    def select(self, keep: Tensor) -> Svd:
        """The singular triples that a mask names."""
        if bool(keep.all()):
            return self
        return replace(self, u=self.u[:, keep], sigma=self.sigma[keep], v=self.v[:, keep])


@dataclass(frozen=True)
class Orthonormal:
    """Q with orthonormal columns, (m, k): a matrix, or Householder vectors with their scales."""

    q: Tensor
    tau: Tensor | None

    def transposed(self, x: Tensor) -> Tensor:
        """Qᵀx: (m,) -> (k,)."""
        if self.tau is None:
            return self.q.T @ x
        return torch.ormqr(self.q, self.tau, x[:, None], transpose=True)[: len(self.tau), 0]

    def applied(self, y: Tensor) -> Tensor:
        """Q y along the last axis: (..., k) -> (..., m)."""
        if self.tau is None:
            return y @ self.q.T
        columns = y.new_zeros(len(self.q), y.shape[:-1].numel())
        columns[: len(self.tau)] = y.reshape(-1, len(self.tau)).T
        return torch.ormqr(self.q, self.tau, columns).T.reshape(*y.shape[:-1], len(self.q))


def svd(a: Tensor, *, polar: bool | None = None) -> Svd:
    """The thin SVD of a finite matrix.

    Args:
        a: (n, p).
        polar: whether through polar factors; by default on CUDA.
    """
    polar = a.is_cuda if polar is None else polar
    reduces = max(a.shape) >= _REDUCE * min(a.shape) and a.numel() > _SMALL
    if not a.numel() or not (polar or reduces):
        u, sigma, vt = torch.linalg.svd(a, full_matrices=False)
        return Svd(u, sigma, vt.T)
    wide = a.shape[0] < a.shape[1]
    tall = a.T if wide else a
    if tall.shape[0] == tall.shape[1]:
        q, triangle = None, tall
    else:
        q, triangle = qr(tall)
    u, sigma, v = polar_svd(triangle) if polar else _plain(triangle)
    return Svd(v, sigma, u, q, wide) if wide else Svd(u, sigma, v, q, wide)


def _plain(r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # CUDA's default, Jacobi rotations, takes seconds where singular values vanish
    u, sigma, vt = torch.linalg.svd(r, driver="gesvd" if r.is_cuda else None)
    return u, sigma, vt.T


def qr(a: Tensor) -> tuple[Orthonormal, Tensor]:
    """A = QR. On CUDA Q is formed: there many small reflections cost more than one product."""
    if a.is_cuda:
        q, r = torch.linalg.qr(a)
        return Orthonormal(q, None), r
    h, tau = torch.geqrf(a)
    return Orthonormal(h, tau), h[: len(tau)].triu()


def polar_svd(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V of a square matrix, through A = W H; where that failed, by the usual SVD."""
    largest = a.abs().amax()
    unit = a / torch.where(largest > 0, largest, 1.0)
    length = unit.norm()
    unit = unit / torch.where(length > 0, length, 1.0)
    w = polar_factor(unit)
    h = w.T @ unit
    h = (h + h.T) / 2
    # W H = A for a symmetric H ≥ 0 makes W an isometry on the range, hence H² = AᵀA
    wrong = (w @ h - unit).norm()
    if not bool(wrong <= 100 * sqrt(len(a)) * torch.finfo(a.dtype).eps):
        return _plain(a)
    sigma, v = torch.linalg.eigh(h)
    sigma, v = sigma.flip(0).clamp(min=0) * length * largest, v.flip(1)
    return w @ v, sigma, v


def polar_factor(x: Tensor) -> Tensor:
    r"""W of x = W H for a square x with ‖x‖ ≤ 1, by dynamically weighted Halley iterations.

    x ← x (a + b xᵀx)(1 + c xᵀx)⁻¹ takes all singular values to 1, the more quickly the better a, b,
    c fit the interval they lie in. Far below round-off they may stop short of 1.
    """
    eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
    eps = torch.finfo(x.dtype).eps
    # c·ε·√n stays far below 1, or a Cholesky factorization of 1 + c xᵀx may break down
    for a, b, c in _weights(1e-4 * eps, eps, 2e-3 / (eps * sqrt(len(x)))):
        y = _resolvent(x, c, eye)
        x = (b / c) * x + (a - b / c) * y
    return x


def _weights(low: float, eps: float, largest: float) -> Iterator[tuple[float, float, float]]:
    """(a, b, c) for [low, 1], for its image, and on until that is 1 to eps, with c ≤ largest.

    The best rational function of this form on [low, 1] has b = (a − 1)²/4 and c = a + b − 1.
    """
    while 1 - low > 10 * eps:
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        root = sqrt(1 + d)
        a = root + sqrt(max(0.0, 2 - d + 2 * (2 - low**2) / (low**2 * root)))
        a = min(a, 2 * sqrt(1 + largest) - 1)
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        yield a, b, c
        low = min(1.0, low * (a + b * low**2) / (1 + c * low**2))


def _resolvent(x: Tensor, c: float, eye: Tensor) -> Tensor:
    r"""x (1 + c xᵀx)⁻¹, from Cholesky factors alone.

    With the orthonormal factor Q = [Q₁; Q₂] of [√c x; 1] it is Q₁Q₂ᵀ/√c. Where c is large, one
    Cholesky factorization gives a Q that is orthonormal to c·ε only, and a second one mends it.
    """
    lower = torch.linalg.cholesky_ex(torch.addmm(eye, x.T, x, alpha=c)).L
    if c <= 100:
        return torch.cholesky_solve(x.T, lower).T
    stacked = torch.cat([sqrt(c) * x, eye])
    q = torch.linalg.solve_triangular(lower.T, stacked, upper=True, left=False)
    lower = torch.linalg.cholesky_ex(q.T @ q).L
    return (q[: len(x)] @ torch.cholesky_solve(q[len(x) :].T, lower)) / sqrt(c)
