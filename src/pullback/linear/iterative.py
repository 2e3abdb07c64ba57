r"""Σ_i L_iL_iᵀ Λ R_iᵀR_i = r by conjugate gradients, where an SVD of the tangent is too large.

The ranges of L_i = W₁⋯W_{i−1} shrink with i and those of R_iᵀ = (W_{i+1}⋯W_L)ᵀ grow. So there are
orthonormal bases U and H adapted to all of them, in which the range of JJᵀ is a set of coordinate
pairs (a, b): what r has outside is dropped first, and a singular system becomes a consistent one.
The diagonal of JJᵀ in these bases preconditions the iteration; it is exact where the factors are
balanced, since then all terms commute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.errors import PullbackError
from ..grams import Gram
from ..grams.base import Structure
from ..solvers import ConjugateGradient
from .tangents import Grid


class _Kernel(Gram):
    """Λ ↦ Σ L LᵀΛ RᵀR on flat Λ, (N·m,)."""

    def __init__(self, tangent: Grid) -> None:
        self._tangent = tangent
        self.size = self.count = tangent.count
        sample = tangent.terms[0].left
        self.dtype, self.device = sample.dtype, sample.device
        self.structure = Structure("operator", factored=False, closed=True)

    def matvec(self, v: Tensor) -> Tensor:
        return self._tangent.push(self._tangent.pull(v))


def iterated(
    tangent: Grid, r: Tensor, damping: float = 0.0, rcond: float | None = None, tol: float = 1e-13
) -> Tensor:
    """Jᵀ(JJᵀ + λ)⁺r, (p,), by preconditioned conjugate gradients.

    Raises:
        PullbackError: where the iteration does not reach √ε of the right-hand side.
    """
    lefts, rights = [t.left for t in tangent.terms], [t.right.T for t in tangent.terms]
    u, inside_u, l2 = _adapted(lefts, rcond)
    h, inside_h, r2 = _adapted(rights, rcond)
    inside = (inside_u.T.to(r.dtype) @ inside_h.to(r.dtype)) > 0
    diagonal = torch.where(inside, l2.T @ r2 + damping, 1.0)

    def scaled(v: Tensor) -> Tensor:
        z = u.T @ v.view(tangent.shape) @ h
        return (u @ torch.where(inside, z / diagonal, 0.0) @ h.T).flatten()

    z = torch.where(inside, u.T @ r.view(tangent.shape) @ h, 0.0)
    solver = ConjugateGradient(damping, tol=tol, preconditioner=scaled)
    found = solver.solve(_Kernel(tangent), (u @ z @ h.T).flatten())
    limit = 10 * torch.finfo(r.dtype).eps ** 0.5
    if not found.status.ok or not (found.residual or 0.0) <= limit:
        raise PullbackError(
            "The minimum-norm natural gradient was not found",
            f"conjugate gradients stopped at a residual of {found.residual:.2g}: the products of "
            "the factors are nearly rank-deficient",
            "Add damping, or use split_natural_gradient where it exists",
        )
    return torch.cat([m.flatten() for m in tangent.pull(found.x)])


def _adapted(sides: Sequence[Tensor], rcond: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """An orthonormal basis u adapted to nested ranges of the sides M_i.

    Also whether u_a is in the range of M_i, (i, a), and ‖M_iᵀu_a‖², (i, a).
    """
    ranges = [torch.linalg.svd(m, full_matrices=False) for m in sides]
    eps = torch.finfo(sides[0].dtype).eps
    spans = []
    for m, (basis, sigma, _) in zip(sides, ranges, strict=True):
        cut = max(m.shape) * eps if rcond is None else rcond
        spans.append(basis[:, sigma > cut * sigma.max()])
    smallest = min(range(len(sides)), key=lambda i: spans[i].shape[1])
    total = torch.stack([s @ s.T for s in spans]).sum(0)
    # within the smallest range its own singular vectors, so that balanced factors commute
    first = spans[smallest]
    rest = total - first @ (first.T @ total)
    rest = rest - (rest @ first) @ first.T
    values, vectors = torch.linalg.eigh((rest + rest.T) / 2)
    other = vectors[:, values.abs().argsort(descending=True)][:, : len(total) - first.shape[1]]
    u = torch.cat([first, other - first @ (first.T @ other)], 1)
    u = torch.linalg.qr(u).Q
    inside = torch.stack([(s.T @ u).square().sum(0) > 0.5 for s in spans])
    return u, inside, torch.stack([(m.T @ u).square().sum(0) for m in sides])
