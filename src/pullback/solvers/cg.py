"""Conjugate gradients: products with G alone, in parameter or in sample space."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._core.errors import Status
from ..grams import FactoredGram, Gram
from .base import Damping, Solution, Solver, delicate, resolve

_WINDOW = 10
_DRIFT = 1e3  # true residuals over the tolerance, at most
_SHARE = 0.1  # of x that may be wrong


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
        self.damping, self.tol, self.progress = damping, tol, progress
        self.max_iterations, self.preconditioner = max_iterations, preconditioner

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
        value = resolve(self.damping if damping is None else damping, state)
        x, residual, done = self._in_samples(state, rhs, value, whitened)
        if x is None:
            x, residual, done = self._iterate(lambda v: state.matvec(v) + value * v, rhs)
            if done and not self.progress:  # the iteration's own residual drifts from the true one
                residual = _relative(state.matvec(x) + value * x - rhs, rhs)
        status = Status.OK if done else Status.MAX_ITERATIONS
        if done and not self.progress and self._uncertain(x, residual, rhs, value):
            status = Status.INACCURATE
        if not bool(torch.isfinite(x).all()) or not (done or bool(x.any())):
            return Solution(torch.zeros_like(rhs), value, None, residual, Status.SINGULAR)
        return Solution(x, value, None, residual, status)

    def _uncertain(self, x: Tensor, residual: float, g: Tensor, damping: float) -> bool:
        """Whether x may be wrong by a tenth of its length: by ‖residual‖/λ at most."""
        if residual > _DRIFT * self._least(g):
            return True
        typical = g.norm() / x.norm()  # between the eigenvalues of G + λ
        small = damping > 0 and delicate(damping, typical, g.dtype)
        return small and residual * float(typical) > _SHARE * damping

    def _least(self, b: Tensor) -> float:
        """The tolerance; no residual can be seen below round-off."""
        return max(self.tol, 4 * torch.finfo(b.dtype).eps)

    def _in_samples(
        self, gram: Gram, g: Tensor, damping: float, r: Tensor | None
    ) -> tuple[Tensor | None, float, bool]:
        """x = Aᵀy from (AAᵀ + λ)y = r, unless its residual in parameter space is not small.

        Where r is huge on tiny rows, a y that is accurate relative to r is not accurate enough.
        """
        elsewhere = self.preconditioner is not None or self.progress > 0 or gram.count >= gram.size
        if r is None or not isinstance(gram, FactoredGram) or elsewhere:
            return None, 0.0, False
        kernel = gram.kernel() if gram.structure.holds == "kernel" else None

        def product(c: Tensor) -> Tensor:
            """(AAᵀ + λ)c, from the matrix where it is held."""
            image = gram.project(gram.lift(c)) if kernel is None else kernel @ c
            return image + damping * c

        y, _, done = self._iterate(product, r)
        x = gram.lift(y)
        relative = _relative(gram.matvec(x) + damping * x - g, g)
        accurate = relative <= _DRIFT * self._least(g)
        return (x, relative, done) if accurate or not done else (None, relative, done)

    def _iterate(
        self, product: Callable[[Tensor], Tensor], b: Tensor
    ) -> tuple[Tensor, float, bool]:
        apply = self.preconditioner or (lambda v: v)
        x, residual = torch.zeros_like(b), b.clone()
        z = apply(residual)
        direction, inner = z.clone(), residual @ z
        size, tol = float(b.norm()), self._least(b)
        if size == 0:
            return x, 0.0, True
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
            if relative <= tol or self._stalled(models):
                return x, relative, True
            z = apply(residual)
            inner, before = residual @ z, inner
            direction = z + (inner / before) * direction
        relative = float(residual.norm()) / size
        return x, relative, relative <= tol

    def _stalled(self, models: list[float]) -> bool:
        if len(models) <= _WINDOW:
            return False
        gained = models[-1 - _WINDOW] - models[-1]
        return gained < _WINDOW * self.progress * abs(models[-1])


def _relative(left: Tensor, b: Tensor) -> float:
    """‖left‖/‖b‖."""
    return float(left.norm()) / max(float(b.norm()), torch.finfo(b.dtype).tiny)
