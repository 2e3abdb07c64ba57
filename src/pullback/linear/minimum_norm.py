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
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.checks import require_finite_tensor
from .._core.errors import PullbackError
from .._core.factor import Diagonal
from ..grams import Operator
from ..solvers import ConjugateGradient, PseudoInverse
from .grams import CoreLimits, FlatFactor, make_tangent_gram
from .parameters import refuse_zero_tangent
from .tangents import FactorTangent, MatrixTangent, products_around


def solve_iteratively(
    tangent: MatrixTangent, r: Tensor, damping: float = 0.0, rcond: float | None = None
) -> Tensor:
    """Jᵀ(JJᵀ + λ)⁺r, (p,), by preconditioned conjugate gradients.

    Raises:
        PullbackError: where the iteration does not reach √ε of the right-hand side.
    """
    left = _adapt_basis([term.left for term in tangent.terms], rcond)
    right = _adapt_basis([term.right.T for term in tangent.terms], rcond)
    is_inside = (left.is_inside.T.to(r.dtype) @ right.is_inside.to(r.dtype)) > 0
    diagonal = torch.where(is_inside, left.squares.T @ right.squares + damping, 1.0)

    def to_coordinates(v: Tensor) -> Tensor:
        return left.vectors.T @ v.view(tangent.shape) @ right.vectors

    def from_coordinates(z: Tensor) -> Tensor:
        return (left.vectors @ torch.where(is_inside, z, 0.0) @ right.vectors.T).flatten()

    solver = ConjugateGradient(
        damping,
        tol=1e-13,
        preconditioner=lambda v: from_coordinates(to_coordinates(v) / diagonal),
    )
    kernel = Operator(  # JJᵀ
        tangent.pull_flat,
        lambda v: tangent.push(tangent.split(v)),
        (tangent.size, tangent.count),
        r.dtype,
        r.device,
    )
    solution = solver.solve(kernel, from_coordinates(to_coordinates(r)))
    limit = 10 * torch.finfo(r.dtype).eps ** 0.5
    if not solution.status.ok or not (solution.residual or 0.0) <= limit:
        raise PullbackError(
            "The minimum-norm natural gradient was not found",
            f"conjugate gradients stopped at a residual of {solution.residual:.2g}: the products "
            "of the factors are nearly rank-deficient",
            "Add damping, or use split_natural_gradient where it exists",
        )
    return tangent.pull_flat(solution.x)


@dataclass(frozen=True)
class _AdaptedBasis:
    """An orthonormal basis u adapted to nested ranges of matrices M_i.

    Attributes:
        vectors: u, by columns.
        is_inside: whether u_a is in the range of M_i, (i, a).
        squares: ‖M_iᵀu_a‖², (i, a).
    """

    vectors: Tensor
    is_inside: Tensor
    squares: Tensor


def _adapt_basis(matrices: Sequence[Tensor], rcond: float | None) -> _AdaptedBasis:
    """Return a basis adapted to the ranges of the matrices."""
    ranges = [_Range.find(matrix, rcond) for matrix in matrices]
    projections = torch.stack([r.basis @ r.basis.T for r in ranges]).sum(0)
    # Within the smallest range the basis consists of its singular vectors, so that balanced factors
    # commute.
    first = min(ranges, key=lambda r: (r.basis.shape[1], r.conditioning)).basis
    remainder = projections - first @ (first.T @ projections)
    remainder = remainder - (remainder @ first) @ first.T
    values, vectors = torch.linalg.eigh((remainder + remainder.T) / 2)
    by_size = values.abs().argsort(descending=True)
    other = vectors[:, by_size][:, : len(projections) - first.shape[1]]
    u = torch.linalg.qr(torch.cat([first, other - first @ (first.T @ other)], 1)).Q
    return _AdaptedBasis(
        u,
        torch.stack([(r.basis.T @ u).square().sum(0) > 0.5 for r in ranges]),
        torch.stack([(matrix.T @ u).square().sum(0) for matrix in matrices]),
    )


@dataclass(frozen=True)
class _Range:
    """The range of a matrix.

    Attributes:
        basis: left singular vectors, by columns.
        conditioning: the smallest singular value over the largest; 1 for an isometry, 0 for zeros.
    """

    basis: Tensor
    conditioning: float

    @classmethod
    def find(cls, matrix: Tensor, rcond: float | None) -> _Range:
        """Find the range, for singular values above rcond·σ_max."""
        if rcond is None:
            rcond = max(matrix.shape) * torch.finfo(matrix.dtype).eps
        vectors, sigma, _ = torch.linalg.svd(matrix, full_matrices=False)
        is_kept = sigma > rcond * sigma.max()
        if not bool(is_kept.any()):
            return cls(vectors[:, is_kept], 0.0)
        return cls(vectors[:, is_kept], float(sigma[is_kept].min() / sigma.max()))


#: entries of the tangent that may be decomposed where the iteration fails: 1 GiB in float64
LARGEST_CORE = CoreLimits(side=2**27, entries=2**27)


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
    gram = make_tangent_gram(tangent, ones)
    if gram.structure.holds == "operator" and isinstance(tangent, MatrixTangent):
        try:
            return solve_iteratively(tangent, r, damping, rcond)
        except PullbackError:
            if not LARGEST_CORE.can_hold(tangent.count, tangent.width):
                raise
        gram = make_tangent_gram(tangent, ones, LARGEST_CORE)
    solver = PseudoInverse(rcond)
    return solver.solve(solver.init(gram), gram.lift(r), damping or None, whitened=r).x


def split_obstacle(factors: Sequence[Tensor]) -> str:
    """Return why the split does not solve J x = ∇ for every ∇, or "".

    It does where every A_i = W₁⋯W_{i−1} has full row rank and every B_i = W_{i+1}⋯W_L full column
    rank. That J has full row rank is not enough.
    """
    if not len(factors):
        raise PullbackError("There are no factors", "the list is empty", "Pass at least one matrix")
    for i, w in enumerate(factors):
        require_finite_tensor(f"Factor {i}", w, (factors[i - 1].shape[-1] if i else "d", "d"))
    for i, (before, after) in enumerate(zip(*products_around(factors), strict=True)):
        row_rank = int(torch.linalg.matrix_rank(before))
        if row_rank < before.shape[0]:
            return (
                f"the {i} factors before factor {i} multiply to rank {row_rank} of "
                f"{before.shape[0]} rows"
            )
        column_rank = int(torch.linalg.matrix_rank(after))
        if column_rank < after.shape[1]:
            return (
                f"the {len(factors) - 1 - i} factors after factor {i} multiply to rank "
                f"{column_rank} of {after.shape[1]} columns"
            )
    return ""
