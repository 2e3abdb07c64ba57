"""Conjugate gradients: products with G alone, in parameter or in sample space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._core.errors import Status
from ..grams import FactoredGram, Gram
from .base import Damping, Solution, Solver, loses_digits, resolve


@dataclass(frozen=True)
class IterationLimits:
    """When an iteration stops, and when its answer is doubted."""

    #: steps over which progress is measured (the rule of Hessian-free optimization)
    window: int = 10
    #: the true residual may exceed the tolerance by this factor: the iteration's own drifts from
    #: it, and an answer with three digits fewer than asked for is not called converged
    drift: float = 1e3
    #: the fraction of ‖x‖ by which x may be wrong: a direction that is off by a tenth descends
    wrong_fraction: float = 0.1
    #: no residual is seen below this many units of round-off: G x + λx − g takes three roundings
    #: beside those of the product
    round_off: float = 4.0


_LIMITS = IterationLimits()


@dataclass(frozen=True)
class Iterate:
    """Where an iteration ended: x, its relative residual, and whether a stopping rule held."""

    x: Tensor
    residual: float
    has_converged: bool


class ConjugateGradient(Solver):
    r"""x ≈ (G + λ)⁻¹g by preconditioned conjugate gradients.

    Where r is known, A has fewer rows than columns, and there is neither a preconditioner nor a
    rule of progress, the iteration runs on (AAᵀ + λ)y = r with x = Aᵀy.

    A small residual e does not make x right: it may be wrong by ‖e‖/λ. Where λ is tiny and that is
    more than a tenth of ‖x‖, the status is `INACCURATE`, but for a rule of progress.

    Args:
        damping: absolute, or `Relative(c)`.
        tol: stop when the residual is below tol·‖right-hand side‖.
        progress: stop when, over the last ten steps, the quadratic model gained less than this
            fraction of its value per step (the rule of Hessian-free optimization).
        max_iterations: by default twice the dimension of the system.
        preconditioner: a function v ↦ P⁻¹v on parameter vectors.
    """

    prefers = "products"

    def __init__(
        self,
        damping: Damping = 1e-3,
        *,
        tol: float = 1e-10,
        progress: float = 0.0,
        max_iterations: int | None = None,
        preconditioner: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.damping = damping
        self.tol = tol
        self.progress = progress
        self.max_iterations = max_iterations
        self.preconditioner = preconditioner

    def init(self, gram: Gram) -> Gram:
        return gram

    def solve(
        self,
        state: Gram,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        if damping is None:
            damping = self.damping
        value = resolve(damping, state)
        iterate = self._solve_in_sample_space(state, rhs, value, whitened)
        if iterate is None:
            iterate = self._solve_in_parameter_space(state, rhs, value)
        x = iterate.x
        is_zero = not iterate.has_converged and not bool(x.any())
        if is_zero or not bool(torch.isfinite(x).all()):
            zero = torch.zeros_like(rhs)
            return Solution(zero, value, None, iterate.residual, Status.SINGULAR)
        status = self._judge(iterate, rhs, value)
        return Solution(x, value, None, iterate.residual, status)

    def _judge(self, iterate: Iterate, g: Tensor, damping: float) -> Status:
        """Return OK if a stopping rule held and x, wrong by ‖residual‖/λ at most, is accurate."""
        if not iterate.has_converged:
            return Status.MAX_ITERATIONS
        if self.progress:
            return Status.OK
        if iterate.residual > _LIMITS.drift * self._tolerance(g):
            return Status.INACCURATE
        typical = g.norm() / iterate.x.norm()  # between the eigenvalues of G + λ
        is_small = damping > 0 and loses_digits(damping, typical, g.dtype)
        if is_small and iterate.residual * float(typical) > _LIMITS.wrong_fraction * damping:
            return Status.INACCURATE
        return Status.OK

    def _tolerance(self, b: Tensor) -> float:
        """Return the relative residual to reach; none is seen below round-off."""
        return max(self.tol, _LIMITS.round_off * torch.finfo(b.dtype).eps)

    def _solve_in_parameter_space(self, gram: Gram, g: Tensor, damping: float) -> Iterate:
        iterate = self._iterate(lambda v: gram.matvec(v) + damping * v, g)
        if not iterate.has_converged or self.progress:
            return iterate
        # the iteration's own residual drifts from the true one
        true_residual = gram.matvec(iterate.x) + damping * iterate.x - g
        return replace(iterate, residual=_relative_norm(true_residual, g))

    def _solve_in_sample_space(
        self, gram: Gram, g: Tensor, damping: float, r: Tensor | None
    ) -> Iterate | None:
        """Return x = Aᵀy from (AAᵀ + λ)y = r; None if this is no option, or x is not accurate.

        Where r is huge on tiny rows, a y that is accurate relative to r is not accurate enough.
        """
        if r is None or not isinstance(gram, FactoredGram) or gram.count >= gram.size:
            return None
        if self.preconditioner is not None or self.progress > 0:
            return None
        kernel = gram.kernel().to(gram.dtype) if gram.structure.holds == "kernel" else None

        def product(c: Tensor) -> Tensor:
            """Return (AAᵀ + λ)c, from the matrix if the Gram has it."""
            if kernel is None:
                image = gram.project(gram.lift(c))
            else:
                image = kernel @ c
            return image + damping * c

        in_samples = self._iterate(product, r)
        x = gram.lift(in_samples.x)
        residual = _relative_norm(gram.matvec(x) + damping * x - g, g)
        is_accurate = residual <= _LIMITS.drift * self._tolerance(g)
        if in_samples.has_converged and not is_accurate:
            return None
        return Iterate(x, residual, in_samples.has_converged)

    def _iterate(self, product: Callable[[Tensor], Tensor], b: Tensor) -> Iterate:
        """Return the solution of `product`(x) = b by preconditioned conjugate gradients."""
        apply = self.preconditioner or (lambda v: v)
        x = torch.zeros_like(b)
        residual = b.clone()
        z = apply(residual)
        direction = z.clone()
        inner = residual @ z
        size = float(b.norm())
        tolerance = self._tolerance(b)
        if size == 0:
            return Iterate(x, 0.0, True)
        models: list[float] = []
        for _ in range(self.max_iterations or 2 * len(b)):
            image = product(direction)
            curvature = direction @ image
            if not float(curvature) > 0:
                break
            step = inner / curvature
            x = x + step * direction
            residual = residual - step * image
            relative = float(residual.norm()) / size
            if self.progress:
                models.append(-0.5 * float(x @ (residual + b)))
            if relative <= tolerance or self._has_stalled(models):
                return Iterate(x, relative, True)
            z = apply(residual)
            previous_inner = inner
            inner = residual @ z
            direction = z + (inner / previous_inner) * direction
        relative = float(residual.norm()) / size
        return Iterate(x, relative, relative <= tolerance)

    def _has_stalled(self, models: list[float]) -> bool:
        """Return True if the quadratic model gained too little over the last steps."""
        window = _LIMITS.window
        if len(models) <= window:
            return False
        gain = models[-1 - window] - models[-1]
        return gain < window * self.progress * abs(models[-1])


def _relative_norm(error: Tensor, b: Tensor) -> float:
    """Return ‖error‖/‖b‖."""
    return float(error.norm()) / max(float(b.norm()), torch.finfo(b.dtype).tiny)
