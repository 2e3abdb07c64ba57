"""Damped solve by a Cholesky factorization on the smaller of parameter and sample space."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._core.errors import Status
from ..grams import FactoredGram, Gram
from .base import Damping, Solution, Solver, loses_digits, measure_residual, resolve
from .pinv import PseudoInverse, Spectrum


@dataclass(frozen=True)
class CholeskyLimits:
    """When a factorization is tried again, and when its digits are lost."""

    #: the factor by which the damping grows where the matrix is not positive definite: sixteen
    #: times from the round-off of float64 to the matrix itself
    growth: float = 10.0
    #: factorizations at most: twenty powers of ten reach any matrix that is finite
    most_tries: int = 20
    #: undamped, pivots below this many units of round-off stand for zero ones: a pivot is a
    #: difference of rounded sums
    zero_pivot: float = 10.0
    #: pivots below this many units of G's round-off leave no digit of x, or one at most
    lost_pivot: float = 30.0


_LIMITS = CholeskyLimits()


@dataclass(frozen=True)
class CholeskyFactor:
    """L of G + damping = L Lᵀ, with the damping that was needed."""

    lower: Tensor
    damping: float

    def solve(self, b: Tensor) -> Tensor:
        """Return (L Lᵀ)⁻¹b for a vector, in the dtype of L."""
        return torch.cholesky_solve(b.to(self.lower.dtype)[:, None], self.lower)[:, 0]


@dataclass
class Factored:
    """The matrix to be damped and factorized, and the last factor by the damping asked for."""

    gram: Gram
    matrix: Tensor
    in_samples: bool
    factors: dict[float, CholeskyFactor] = field(default_factory=dict)


class Cholesky(Solver):
    r"""x = (G + λ)⁻¹g, by p × p or n × n Cholesky, whichever is smaller.

    In sample space x = Aᵀ(AAᵀ + λ)⁻¹r where r is known, else (g − Aᵀ(AAᵀ + λ)⁻¹A g)/λ. Every
    new λ costs one factorization (use `PseudoInverse` for a whole path of dampings). If the
    matrix is not positive definite λ grows tenfold until it is, and the solution says so. Where
    a pivot is of the size of round-off, x has no digits left, and the status is `INACCURATE`.

    Args:
        damping: absolute, or `Relative(c)` for c·tr(G)/p.
    """

    def __init__(self, damping: Damping = 1e-3) -> None:
        self.damping = damping

    def init(self, gram: Gram) -> Factored | Spectrum:
        if gram.structure.spectral:
            return PseudoInverse().init(gram)
        if isinstance(gram, FactoredGram) and (
            gram.structure.holds == "kernel" or gram.count < gram.size
        ):
            return Factored(gram, gram.kernel(), True)
        return Factored(gram, gram.dense(), False)

    def solve(
        self,
        state: Factored | Spectrum,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        if damping is None:
            damping = self.damping
        if isinstance(state, Spectrum):  # every damping from one spectrum
            return PseudoInverse().solve(state, rhs, damping, whitened=whitened)
        gram = state.gram
        requested = resolve(damping, gram)
        factor = self._factorize(state, requested)
        if factor is None:
            return Solution(torch.zeros_like(rhs), requested, 0, status=Status.SINGULAR)
        if state.in_samples:
            assert isinstance(gram, FactoredGram)
            x = _solve_in_sample_space(gram, factor, rhs, whitened)
        else:
            x = _solve_in_parameter_space(gram, factor, rhs, whitened)
        status = Status.OK if factor.damping == requested else Status.GREW_DAMPING
        solution = Solution(x, factor.damping, min(gram.count, gram.size), status=status)
        return _check_digits(solution, state, factor, rhs, from_gradient=whitened is None)

    def _factorize(self, state: Factored, requested: float) -> CholeskyFactor | None:
        """Return the factor at the damping, or at a larger one; None if all tries failed."""
        if requested in state.factors:
            return state.factors[requested]
        scale = float(state.matrix.diagonal().abs().mean())
        eps = torch.finfo(state.matrix.dtype).eps
        damping = requested
        for _ in range(_LIMITS.most_tries):
            lower = _factorize_definite(state.matrix, damping)
            if lower is not None:
                factor = CholeskyFactor(lower, damping)
                state.factors = {requested: factor}
                return factor
            # less than scale·√ε would amplify round-off
            damping = max(_LIMITS.growth * damping, scale * eps**0.5)
        return None


def _factorize_definite(matrix: Tensor, damping: float) -> Tensor | None:
    """Return L of matrix + damping = L Lᵀ, or None where it is not positive definite."""
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    lower, info = torch.linalg.cholesky_ex(damped)
    pivots = lower.diagonal().square()
    floor = 0.0
    if damping == 0:  # a pivot of the size of round-off stands for a zero one
        eps = torch.finfo(matrix.dtype).eps
        floor = _LIMITS.zero_pivot * eps * float(damped.diagonal().max())
    is_definite = int(info) == 0 and bool((pivots > floor).all())
    if is_definite and bool(torch.isfinite(pivots).all()):
        return lower
    return None


def _check_digits(
    solution: Solution, state: Factored, factor: CholeskyFactor, rhs: Tensor, *, from_gradient: bool
) -> Solution:
    """Return the solution, with its residual and a status where digits may be lost."""
    norm = torch.linalg.matrix_norm(state.matrix)  # the largest eigenvalue is not above it
    smallest_pivot = float(factor.lower.diagonal().square().min())
    eps = torch.finfo(factor.lower.dtype).eps
    is_lost = smallest_pivot <= _LIMITS.lost_pivot * eps * float(norm)
    if is_lost and solution.status is Status.OK:
        solution = replace(solution, status=Status.INACCURATE)
    divides_by_damping = state.in_samples and from_gradient
    if is_lost or (divides_by_damping and loses_digits(factor.damping, norm, rhs.dtype)):
        return measure_residual(solution, state.gram, rhs)
    return solution


def _solve_in_sample_space(
    gram: FactoredGram, factor: CholeskyFactor, g: Tensor, r: Tensor | None
) -> Tensor:
    """Return x from the factor of AAᵀ + λ."""
    if r is not None:
        return gram.lift(factor.solve(r))
    if factor.damping > 0:
        return (g - gram.lift(factor.solve(gram.project(g)))) / factor.damping
    return gram.lift(factor.solve(factor.solve(gram.project(g))))


def _solve_in_parameter_space(
    gram: Gram, factor: CholeskyFactor, g: Tensor, r: Tensor | None
) -> Tensor:
    """Return x by corrected semi-normal equations: one refinement with the residual through A."""
    x = factor.solve(g)
    if r is None or not isinstance(gram, FactoredGram):
        return x
    return x + factor.solve(gram.lift(r - gram.project(x)) - factor.damping * x)
