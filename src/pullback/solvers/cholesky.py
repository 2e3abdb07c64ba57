"""Damped solve by a Cholesky factorization on the smaller of parameter and sample space."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._core.errors import Status
from ..grams import FactoredGram, Gram
from .base import Damping, Solution, Solver, delicate, measure_residual, resolve
from .pinv import PseudoInverse, Spectrum

_GROWTH, _TRIES = 10.0, 20
_LOST = 30.0  # pivots below so many units of G's round-off leave no digit of x


@dataclass
class Factored:
    """The matrix to be damped and factorized, and the last factor."""

    gram: Gram
    matrix: Tensor
    in_samples: bool
    factors: dict[float, tuple[Tensor, float]] = field(default_factory=dict)


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
        if isinstance(state, Spectrum):  # every damping from one spectrum
            damping = self.damping if damping is None else damping
            return PseudoInverse().solve(state, rhs, damping, whitened=whitened)
        gram = state.gram
        wanted = resolve(self.damping if damping is None else damping, gram)
        factor = self._factor(state, wanted)
        if factor is None:
            return Solution(torch.zeros_like(rhs), wanted, 0, status=Status.SINGULAR)
        lower, used = factor

        def inverse(b: Tensor) -> Tensor:
            return torch.cholesky_solve(b[:, None], lower)[:, 0]

        if state.in_samples:
            assert isinstance(gram, FactoredGram)
            x = _sample_space(gram, inverse, rhs, whitened, used)
        else:
            x = _parameter_space(gram, inverse, rhs, whitened, used)
        status = Status.OK if used == wanted else Status.GREW_DAMPING
        found = Solution(x, used, min(gram.count, gram.size), status=status)
        top = torch.linalg.matrix_norm(state.matrix)  # the largest eigenvalue is not above it
        least = float(lower.diagonal().square().min())
        lost = least <= _LOST * torch.finfo(lower.dtype).eps * float(top)
        if lost and status is Status.OK:
            found = replace(found, status=Status.INACCURATE)
        blind = state.in_samples and whitened is None
        if lost or (blind and delicate(used, top, rhs.dtype)):
            return measure_residual(found, gram, rhs)
        return found

    def _factor(self, state: Factored, wanted: float) -> tuple[Tensor, float] | None:
        if wanted in state.factors:
            return state.factors[wanted]
        h = state.matrix
        scale = float(h.diagonal().abs().mean())
        eps = torch.finfo(h.dtype).eps
        damping = wanted
        for _ in range(_TRIES):
            damped = h.clone()
            damped.diagonal().add_(damping)
            lower, info = torch.linalg.cholesky_ex(damped)
            pivots = lower.diagonal().square()
            # undamped, a pivot of round-off size stands for a zero one: luck is not definiteness
            floor = 10 * eps * float(damped.diagonal().max()) if damping == 0 else 0.0
            definite = int(info) == 0 and bool((pivots > floor).all())
            if definite and bool(torch.isfinite(pivots).all()):
                state.factors = {wanted: (lower, damping)}
                return lower, damping
            damping = max(_GROWTH * damping, scale * eps**0.5)  # less would amplify round-off
        return None


def _sample_space(
    gram: FactoredGram, inverse, g: Tensor, r: Tensor | None, damping: float
) -> Tensor:
    if r is not None:
        return gram.lift(inverse(r))
    if damping > 0:
        return (g - gram.lift(inverse(gram.project(g)))) / damping
    return gram.lift(inverse(inverse(gram.project(g))))


def _parameter_space(gram: Gram, inverse, g: Tensor, r: Tensor | None, damping: float) -> Tensor:
    """Corrected semi-normal equations: one refinement with the residual taken through A."""
    x = inverse(g)
    if r is None or not isinstance(gram, FactoredGram):
        return x
    return x + inverse(gram.lift(r - gram.project(x)) - damping * x)
