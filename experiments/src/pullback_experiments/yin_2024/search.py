"""The line search as it is printed, and a look at the directions that a step receives."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from pullback.solvers import Damping, Solution
from pullback.steps import GridLineSearch, Local, Move, Step, Wrapper


class ArgMin(GridLineSearch):
    """The best of the grid even where the loss rises: there is no accept test.

    Any loss is a fall from ∞.
    """

    def take(self, local: Local) -> Move:
        return super().take(replace(local, loss=float("inf")))


class Watch(Wrapper):
    """Keeps two numbers of the direction x before anything cuts it.

    Attributes:
        largest: max |x_i|.
        energy: ∇Lᵀx, the squared length of the projected gradient.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.largest, self.energy = float("nan"), float("nan")

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        found = local.solve(damping, about)
        self.largest = float(found.x.abs().max())
        self.energy = float(local.gradient @ found.x)
        return found
