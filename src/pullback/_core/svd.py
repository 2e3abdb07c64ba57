r"""Thin singular value decompositions A = U Σ Vᵀ that are fast for tall, wide and CUDA matrices.

A tall A (or Aᵀ, if A is wide) is first reduced to the triangle of A = QR; U = Q U_R is not
multiplied out, since products with it are all that is wanted. On CUDA, where the usual SVD is slow,
the triangle is decomposed through its polar factors R = W H: the eigenvalues of the positive
semidefinite H are the singular values themselves and not their squares, so that eigh(H) = V Σ Vᵀ,
U_R = W V is as accurate as an SVD (Nakatsukasa and Higham, 2013). On a CPU, singular values below a
cut-off are not computed if they are many: see `row_space`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from .row_space import find_row_space


@dataclass(frozen=True)
class SvdThresholds:
    """When a matrix is decomposed in another way, and when an answer is accepted."""

    #: the ratio of the sides from which on a QR before the SVD pays: with 250 columns it takes
    #: 1.05 times as long at a ratio of 1.2, and 0.74 times at 1.5 (one thread, float64)
    reduction_ratio: float = 1.5
    #: entries up to which one call of LAPACK is fastest: with 60 columns a QR before it takes 1.1
    #: times as long at 1.5, and as long at 2 and 4
    small_entries: int = 2**14
    #: ‖W H − A‖ in units of ε√n up to which polar factors are accepted: round-off leaves a few
    polar_residual: float = 100.0
    #: c of 1 + c xᵀx up to which one Cholesky factorization loses no digits that matter: c·ε is
    #: its error; two digits, as Nakatsukasa and Higham choose
    one_cholesky: float = 100.0
    #: c·ε·√n stays below this, or a Cholesky factorization of 1 + c xᵀx may break down: it does
    #: where round-off reaches the smallest eigenvalue, 1; this leaves a factor of 500
    largest_weight: float = 2e-3
    #: the smallest singular value, in units of ε, that the iteration still takes to 1. Values
    #: below ε are round-off of x; four digits more take one iteration at most.
    smallest_value: float = 1e-4
    #: the iteration ends when all singular values are 1 up to this many ε: it converges
    #: cubically, so that one more iteration is exact or changes nothing
    converged: float = 10.0


_THRESHOLDS = SvdThresholds()


@dataclass(frozen=True)
class Svd:
    """A = U Σ Vᵀ with σ in decreasing order.

    U is `left_q` u and V is `right_q` v, where a None stands for the identity.
    """

    u: Tensor
    sigma: Tensor
    v: Tensor
    left_q: Orthonormal | None = None
    right_q: Orthonormal | None = None

    def left(self, r: Tensor) -> Tensor:
        """Return Uᵀr: (n,) -> (k,)."""
        if self.left_q is not None:
            r = self.left_q.apply_transpose(r)
        return self.u.T @ r

    def right(self, g: Tensor) -> Tensor:
        """Return Vᵀg: (p,) -> (k,)."""
        if self.right_q is not None:
            g = self.right_q.apply_transpose(g)
        return self.v.T @ g

    def combine(self, c: Tensor) -> Tensor:
        """Return V c along the last axis: (..., k) -> (..., p)."""
        x = c @ self.v.T
        if self.right_q is not None:
            return self.right_q.apply(x)
        return x

    def select(self, keep: Tensor) -> Svd:
        """Return the singular triples where the mask is True."""
        if bool(keep.all()):
            return self
        return replace(self, u=self.u[:, keep], sigma=self.sigma[keep], v=self.v[:, keep])


@dataclass(frozen=True)
class Orthonormal:
    """Q with orthonormal columns, (m, k): a matrix, or Householder vectors with their scales."""

    q: Tensor
    tau: Tensor | None

    def apply_transpose(self, x: Tensor) -> Tensor:
        """Return Qᵀx: (m,) -> (k,)."""
        if self.tau is None:
            return self.q.T @ x
        return torch.ormqr(self.q, self.tau, x[:, None], transpose=True)[: len(self.tau), 0]

    def apply(self, y: Tensor) -> Tensor:
        """Return Q y along the last axis: (..., k) -> (..., m)."""
        if self.tau is None:
            return y @ self.q.T
        columns = y.new_zeros(len(self.q), y.shape[:-1].numel())
        columns[: len(self.tau)] = y.reshape(-1, len(self.tau)).T
        return torch.ormqr(self.q, self.tau, columns).T.reshape(*y.shape[:-1], len(self.q))


def svd(a: Tensor, *, polar: bool | None = None, cutoff: float = 0.0) -> Svd:
    """Return the thin SVD of a finite matrix.

    Args:
        a: (n, p).
        polar: whether to decompose through polar factors; None does so on CUDA.
        cutoff: singular triples below this share of the largest singular value may be left out.
            Those slightly above it are then known to a few digits.
    """
    if polar is None:
        polar = a.is_cuda
    is_flat = a.shape[0] < a.shape[1]
    tall = a.T if is_flat else a
    if cutoff and not polar and a.device.type == "cpu":
        basis = find_row_space(tall, cutoff)
        if basis is not None:
            part = _thin_svd(tall @ basis, polar=False)
            return _orient(replace(part, right_q=Orthonormal(basis, None)), is_flat=is_flat)
    return _orient(_thin_svd(tall, polar=polar), is_flat=is_flat)


def _orient(tall: Svd, *, is_flat: bool) -> Svd:
    """Return the SVD of A from that of the tall one of A and Aᵀ, which is Aᵀ if A is flat."""
    if is_flat:
        return Svd(tall.v, tall.sigma, tall.u, left_q=tall.right_q, right_q=tall.left_q)
    return tall


def _thin_svd(tall: Tensor, *, polar: bool) -> Svd:
    """Return the SVD of a matrix with at least as many rows as columns."""
    rows, columns = tall.shape
    is_oblong = rows >= _THRESHOLDS.reduction_ratio * columns
    is_reduced = is_oblong and tall.numel() > _THRESHOLDS.small_entries
    if not tall.numel() or not (polar or is_reduced):
        u, sigma, vt = torch.linalg.svd(tall, full_matrices=False)
        return Svd(u, sigma, vt.T)
    q = None
    triangle = tall
    if rows != columns:
        q, triangle = qr(tall)
    square = polar_svd(triangle) if polar else _direct_svd(triangle)
    return Svd(square.u, square.sigma, square.v, left_q=q)


def _direct_svd(r: Tensor) -> Svd:
    """Return torch's SVD of a square matrix."""
    # CUDA's default, Jacobi rotations, takes seconds where singular values vanish
    driver = "gesvd" if r.is_cuda else None
    u, sigma, vt = torch.linalg.svd(r, driver=driver)
    return Svd(u, sigma, vt.T)


def qr(a: Tensor) -> tuple[Orthonormal, Tensor]:
    """Return Q and R of A = QR.

    On CUDA Q is formed as a matrix: there many small reflections cost more than one product.
    """
    if a.is_cuda:
        q, r = torch.linalg.qr(a)
        return Orthonormal(q, None), r
    h, tau = torch.geqrf(a)
    return Orthonormal(h, tau), h[: len(tau)].triu()


def polar_svd(a: Tensor) -> Svd:
    """Return the SVD of a square matrix through A = W H; if that failed, the usual SVD."""
    largest = a.abs().amax()
    unit = a / torch.where(largest > 0, largest, 1.0)
    length = unit.norm()
    unit = unit / torch.where(length > 0, length, 1.0)
    w = polar_factor(unit)
    h = w.T @ unit
    h = (h + h.T) / 2
    # W H = A for a symmetric H ≥ 0 makes W an isometry on the range, hence H² = AᵀA
    residual = (w @ h - unit).norm()
    accepted = _THRESHOLDS.polar_residual * sqrt(len(a)) * torch.finfo(a.dtype).eps
    if not bool(residual <= accepted):
        return _direct_svd(a)
    eigenvalues, eigenvectors = torch.linalg.eigh(h)
    sigma = eigenvalues.flip(0).clamp(min=0) * length * largest
    v = eigenvectors.flip(1)
    return Svd(w @ v, sigma, v)


def polar_factor(x: Tensor) -> Tensor:
    r"""Return W of x = W H for a square x with ‖x‖ ≤ 1, by dynamically weighted Halley iterations.

    x ← x (a + b xᵀx)(1 + c xᵀx)⁻¹ takes all singular values to 1, the more quickly the better a, b,
    c fit the interval they lie in. Singular values far below round-off may stop short of 1.
    """
    eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
    eps = torch.finfo(x.dtype).eps
    largest = _THRESHOLDS.largest_weight / (eps * sqrt(len(x)))
    for weights in _halley_weights(_THRESHOLDS.smallest_value * eps, eps, largest):
        ratio = weights.b / weights.c
        x = ratio * x + (weights.a - ratio) * _resolvent(x, weights.c, eye)
    return x


@dataclass(frozen=True)
class HalleyWeights:
    """The coefficients of x (a + b xᵀx)(1 + c xᵀx)⁻¹."""

    a: float
    b: float
    c: float


def _halley_weights(low: float, eps: float, largest: float) -> Iterator[HalleyWeights]:
    """Yield the weights of every iteration, with c ≤ largest.

    Singular values begin in [low, 1]. The weights are the best for this interval, then for its
    image, until the image is 1 up to round-off. The best rational function of this form on
    [low, 1] has b = (a − 1)²/4 and c = a + b − 1.
    """
    while 1 - low > _THRESHOLDS.converged * eps:
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        root = sqrt(1 + d)
        a = root + sqrt(max(0.0, 2 - d + 2 * (2 - low**2) / (low**2 * root)))
        a = min(a, 2 * sqrt(1 + largest) - 1)
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        yield HalleyWeights(a, b, c)
        low = min(1.0, low * (a + b * low**2) / (1 + c * low**2))


def _resolvent(x: Tensor, c: float, eye: Tensor) -> Tensor:
    r"""Return x (1 + c xᵀx)⁻¹, from Cholesky factors alone.

    With the orthonormal factor Q = [Q₁; Q₂] of [√c x; 1] it is Q₁Q₂ᵀ/√c. Where c is large, one
    Cholesky factorization gives a Q that is orthonormal to c·ε only, and a second one mends it.
    """
    lower = torch.linalg.cholesky_ex(torch.addmm(eye, x.T, x, alpha=c)).L
    if c <= _THRESHOLDS.one_cholesky:
        return torch.cholesky_solve(x.T, lower).T
    stacked = torch.cat([sqrt(c) * x, eye])
    q = torch.linalg.solve_triangular(lower.T, stacked, upper=True, left=False)
    lower = torch.linalg.cholesky_ex(q.T @ q).L
    return (q[: len(x)] @ torch.cholesky_solve(q[len(x) :].T, lower)) / sqrt(c)
