"""A quadratic (or any) loss as the local picture that a step sees, without an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pullback.grams import Rows
from pullback.solvers import PseudoInverse, Solution, Solver
from pullback.steps import Local


class Bowl:
    """L(w) = ½‖A w − b‖² + extra(w), with the Gauss–Newton model AᵀA at w."""

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        w: Tensor,
        *,
        extra: Callable[[Tensor], Tensor] | None = None,
        solver: Solver | None = None,
        lr: float = 1.0,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.a = a
        self.b = b
        self.w = w
        self.lr = lr
        self.extra = extra or (lambda w: w.new_zeros(()))
        if solver is None:
            self.solver = PseudoInverse()
        else:
            self.solver = solver
        self.gram = Rows(a)
        self.trials = 0
        if state is None:
            self.state = {}
        else:
            self.state = state

    def loss(self, w: Tensor) -> Tensor:
        return 0.5 * (self.a @ w - self.b).square().sum() + self.extra(w)

    def local(self) -> Local:
        g = torch.func.grad(self.loss)(self.w)
        state = self.solver.init(self.gram)

        def solve(damping, about) -> Solution:
            if about is None:
                return self.solver.solve(state, g, damping)
            solution = self.solver.solve(state, g - self.gram.matvec(about), damping)
            return Solution(
                solution.x + about, solution.damping, solution.rank, None, solution.status
            )

        def losses(moves: Tensor) -> Tensor:
            self.trials += len(moves)
            return torch.stack([self.loss(self.w - self.lr * m) for m in moves])

        return Local(
            loss=float(self.loss(self.w)),
            gradient=g,
            solve=solve,
            path=lambda: self.solver.path(state, g),
            inner_products=self.gram.inner_products,
            losses=losses,
            lr=self.lr,
            scaled=lambda v: self.lr * v,
            state=self.state,
        )


def bowl(seed: int = 0, n: int = 6, p: int = 4, **options: Any) -> Bowl:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Bowl(draw(n, p), draw(n), draw(p), **options)
