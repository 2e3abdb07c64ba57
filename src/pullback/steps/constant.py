"""The plain step: one learning rate."""

from __future__ import annotations

from .base import Local, Move, Step, failed


class Constant(Step):
    """w ← w − lr·x; `lr` lives in the optimizer's param groups, where schedulers find it."""

    def __init__(self, lr: float = 1.0) -> None:
        self.lr = self.initial_lr = lr

    def take(self, local: Local) -> Move:
        solution = local.direction()
        return failed(solution) or Move(solution.x, 1.0, solution)
