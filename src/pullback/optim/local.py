"""The local picture a step sees: solutions of the damped system, predictions, trial losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._core.products import full_precision
from ..grams import FactoredGram, Gram
from ..solvers import Damping, Path, Solution, Solver

Solve = Callable[[Damping | None, Tensor | None], Solution]


@dataclass
class System:
    """(G + λ)x = g with g = Aᵀr + e: r where it is known, e what else the loss contains."""

    gram: Gram
    gradient: Tensor
    white: Tensor | None = None
    extra: Tensor | None = None

    @classmethod
    def of(
        cls, gram: Gram, gradient: Tensor, white: Tensor | None, pulled: Tensor | None
    ) -> System:
        """Use r where A is at hand; e is p.grad minus what the recorded outputs explain.

        Both were computed by the same arithmetic, so that without a regularizer they agree to
        round-off, whatever the precision of the forward pass.
        """
        if white is None or pulled is None or not isinstance(gram, FactoredGram):
            return cls(gram, gradient)
        extra = gradient - pulled
        limit = 100 * torch.finfo(gradient.dtype).eps * (gradient.norm() + pulled.norm())
        return cls(gram, gradient, white, extra if bool(extra.norm() > limit) else None)

    def __neg__(self) -> System:
        white = None if self.white is None else -self.white
        extra = None if self.extra is None else -self.extra
        return System(self.gram, -self.gradient, white, extra)

    def solver(
        self, solver: Solver, state: Any
    ) -> Callable[[Damping | None, Tensor | None], Solution]:
        """(damping, about) ↦ the x that minimizes ‖A x − r‖² − 2eᵀx + λ‖x − about‖²."""

        @full_precision(self.gram.device)
        def solve(damping: Damping | None, about: Tensor | None) -> Solution:
            g, r = self.gradient, self.white
            if about is not None:
                g = g - self.gram.matvec(about)
                if r is not None and isinstance(self.gram, FactoredGram):
                    r = r - self.gram.project(about)
            if r is None or self.extra is None:
                found = solver.solve(state, g, damping, whitened=r)
            else:
                found = solver.solve(state, g - self.extra, damping, whitened=r)
                beside = solver.solve(state, self.extra, damping)
                found = replace(found, x=found.x + beside.x)
            return found if about is None else replace(found, x=found.x + about)

        return solve

    def path(self, solver: Solver, state: Any) -> Path | None:
        """All solutions over damping."""
        white = self.white if self.extra is None else None
        return solver.path(state, self.gradient, white)


def explains(gram: Gram, c: Tensor, pulled: Tensor) -> bool:
    """Whether cᵀ(AAᵀ)c is ‖Aᵀc‖², with Aᵀc by autograd: the layers' formulas at a glance."""
    if not isinstance(gram, FactoredGram) or (norms := gram.row_norms()) is None:
        return True
    energy = (
        c @ (gram.kernel() @ c) if gram.structure.holds == "kernel" else gram.lift(c).square().sum()
    )
    tolerance = 10 * torch.finfo(c.dtype).eps ** 0.5 * (c * norms).square().sum()
    return bool((energy - pulled.square().sum()).abs() <= tolerance)
