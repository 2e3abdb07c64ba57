"""The minimum-norm solution of J x = ∇_β for β = W₁⋯W_L: Σ_i L_iL_iᵀ Λ R_iᵀR_i = r.

Where an SVD of the tangent is too large, by conjugate gradients. The ranges of L_i = W₁⋯W_{i−1}
shrink with i and those of R_iᵀ = (W_{i+1}⋯W_L)ᵀ grow. So orthonormal bases U and H are adapted to
all of them, in which the range of JJᵀ is a set of coordinate pairs (a, b): what r has outside is
dropped first, and a singular system becomes a consistent one. The diagonal of JJᵀ in these bases
preconditions the iteration; it is exact for one or two factors and where the factors are balanced,
since all terms commute.

The per-layer split (1/L) A_i⁺ ∇_β B_i⁺ solves it in some cases. The paper prints B⁺ and A⁺ on the
other sides; since vec(A X B) = (Bᵀ ⊗ A) vec X, A_i X B_i = ∇_β/L has the solution A_i⁺∇_βB_i⁺/L.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.checks import refuse_values
from .._core.errors import PullbackError
from .._core.factor import Diagonal
from ..grams import Operator
from ..solvers import ConjugateGradient, PseudoInverse
from .grams import FlatFactor, tangent_gram
from .parameters import refuse_zero_tangent
from .tangents import FactorTangent, MatrixTangent, around


def solve_iteratively(
    tangent: MatrixTangent, r: Tensor, damping: float = 0.0, rcond: float | None = None
) -> Tensor:
    """Jᵀ(JJᵀ + λ)⁺r, (p,), by preconditioned conjugate gradients.

    Raises:
        PullbackError: where the iteration does not reach √ε of the right-hand side.
    """
    lefts, rights = [t.left for t in tangent.terms], [t.right.T for t in tangent.terms]
    u, inside_u, l2 = _adapt_basis(lefts, rcond)
    h, inside_h, r2 = _adapt_basis(rights, rcond)
    inside = (inside_u.T.to(r.dtype) @ inside_h.to(r.dtype)) > 0
    diagonal = torch.where(inside, l2.T @ r2 + damping, 1.0)

    def scaled(v: Tensor) -> Tensor:
        z = u.T @ v.view(tangent.shape) @ h
        return (u @ torch.where(inside, z / diagonal, 0.0) @ h.T).flatten()

    z = torch.where(inside, u.T @ r.view(tangent.shape) @ h, 0.0)
    solver = ConjugateGradient(damping, tol=1e-13, preconditioner=scaled)
    kernel = Operator(  # JJᵀ
        tangent.pulled, lambda v: tangent.push(tangent.split(v)),
        (tangent.size, tangent.count), r.dtype, r.device,
    )  # fmt: skip
    found = solver.solve(kernel, (u @ z @ h.T).flatten())
    limit = 10 * torch.finfo(r.dtype).eps ** 0.5
    if not found.status.ok or not (found.residual or 0.0) <= limit:
        raise PullbackError(
            "The minimum-norm natural gradient was not found",
            f"conjugate gradients stopped at a residual of {found.residual:.2g}: the products of "
            "the factors are nearly rank-deficient",
            "Add damping, or use split_natural_gradient where it exists",
        )
    return tangent.pulled(found.x)


def _adapt_basis(sides: Sequence[Tensor], rcond: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """An orthonormal basis u adapted to nested ranges of the sides M_i.

    Also whether u_a is in the range of M_i, (i, a), and ‖M_iᵀu_a‖², (i, a).
    """
    ranges = [torch.linalg.svd(m, full_matrices=False) for m in sides]
    eps = torch.finfo(sides[0].dtype).eps
    spans, sizes = [], []
    for m, (basis, sigma, _) in zip(sides, ranges, strict=True):
        kept = sigma > (max(m.shape) * eps if rcond is None else rcond) * sigma.max()
        spans.append(basis[:, kept])
        # of ranges with the same dimension that of the side furthest from an isometry
        sizes.append((int(kept.sum()), float(sigma[kept].min() / sigma.max()) if kept.any() else 0))
    smallest = min(range(len(sides)), key=sizes.__getitem__)
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


_LARGEST = 2**27  # entries of the tangent that may be decomposed where the iteration fails


def minimum_norm(
    tangent: FactorTangent,
    r: Tensor,
    *,
    damping: float = 0.0,
    rcond: float | None = None,
) -> Tensor:
    """Jᵀ(JJᵀ + λ)⁺r, (p,).

    An SVD of J in reduced coordinates is the most robust way and takes about a second for a
    thousand rows; beyond, conjugate gradients are tens of times faster and as accurate wherever
    they converge.
    """
    generator = torch.Generator(r.device).manual_seed(0)
    moves = torch.randn(tangent.size, generator=generator, dtype=r.dtype, device=r.device)
    refuse_zero_tangent(tangent.push(tangent.split(moves)).abs().max())
    ones = FlatFactor(Diagonal(r.new_ones(tangent.count, 1)), (tangent.count, 1))
    gram = tangent_gram(tangent, ones)
    if gram.structure.holds == "operator" and isinstance(tangent, MatrixTangent):
        try:
            return solve_iteratively(tangent, r, damping, rcond)
        except PullbackError:
            if tangent.count * tangent.width > _LARGEST:
                raise
        gram = tangent_gram(tangent, ones, side=tangent.count, entries=_LARGEST)
    solver = PseudoInverse(rcond)
    return solver.solve(solver.init(gram), gram.lift(r), damping or None, whitened=r).x


def split_obstacle(factors: Sequence[Tensor]) -> str:
    """Why the split does not solve J x = ∇ for every ∇; empty where it does.

    It does where every A_i = W₁⋯W_{i−1} has full row rank and every B_i = W_{i+1}⋯W_L full column
    rank. That J has full row rank is not enough.
    """
    if not len(factors):
        raise PullbackError("There are no factors", "the list is empty", "Pass at least one matrix")
    for i, w in enumerate(factors):
        refuse_values(f"Factor {i}", w, (factors[i - 1].shape[-1] if i else "d", "d"))
    before, after = around(factors)
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        rows, columns = (int(torch.linalg.matrix_rank(side)) for side in (a, b))
        if rows < a.shape[0]:
            return f"the {i} factors before factor {i} multiply to rank {rows} of {a.shape[0]} rows"
        if columns < b.shape[1]:
            return (
                f"the {len(factors) - 1 - i} factors after factor {i} multiply to rank {columns} "
                f"of {b.shape[1]} columns"
            )
    return ""
