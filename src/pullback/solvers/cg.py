"""Conjugate gradients: products with G alone, in parameter or in sample space."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._core.errors import Status
from ..grams import FactoredGram, Gram
from .base import Damping, Solution, Solver, resolve

_WINDOW = 10


class ConjugateGradient(Solver):
    r"""x ≈ (G + λ)⁻¹g by preconditioned conjugate gradients.

    Where r is known, A has fewer rows than columns, and there is neither a preconditioner nor a
    rule of progress, the iteration runs on (AAᵀ + λ)y = r with x = Aᵀy.

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
        status = Status.OK if done else Status.MAX_ITERATIONS
        if not bool(torch.isfinite(x).all()) or not (done or bool(x.any())):
            return Solution(torch.zeros_like(rhs), value, None, residual, Status.SINGULAR)
        return Solution(x, value, None, residual, status)

    def _in_samples(
        self, gram: Gram, g: Tensor, damping: float, r: Tensor | None
    ) -> tuple[Tensor | None, float, bool]:
        """x = Aᵀy from (AAᵀ + λ)y = r, unless its residual in parameter space is not small.

        Where r is huge on tiny rows, a y that is accurate relative to r is not accurate enough.
        """
        elsewhere = self.preconditioner is not None or self.progress > 0 or gram.count >= gram.size
        if r is None or not isinstance(gram, FactoredGram) or elsewhere:
            return None, 0.0, False
        product = _kernel_product(gram)
        y, _, done = self._iterate(lambda c: product(c) + damping * c, r)
        x = gram.lift(y)
        wrong = float((gram.matvec(x) + damping * x - g).norm())
        relative = wrong / max(float(g.norm()), torch.finfo(g.dtype).tiny)
        accurate = relative <= 1e3 * max(self.tol, 4 * torch.finfo(g.dtype).eps)
        return (x, relative, done) if accurate or not done else (None, relative, done)

    def _iterate(
        self, product: Callable[[Tensor], Tensor], b: Tensor
    ) -> tuple[Tensor, float, bool]:
        apply = self.preconditioner or (lambda v: v)
        x, residual = torch.zeros_like(b), b.clone()
        z = apply(residual)
        direction, inner = z.clone(), residual @ z
        size = float(b.norm())
        tol = max(self.tol, 4 * torch.finfo(b.dtype).eps)  # no residual can be seen below
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


def _kernel_product(gram: FactoredGram) -> Callable[[Tensor], Tensor]:
    """c ↦ AAᵀc, from the matrix where it is held."""
    if gram.structure.holds == "kernel":
        return gram.kernel().matmul
    return lambda c: gram.project(gram.lift(c))
