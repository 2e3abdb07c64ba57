"""Steps around steps: they change the direction that the inner step sees."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..solvers import Damping, Solution
from .base import Local, Move, Step, positive
from .constant import Constant


class Wrapper(Step):
    """A step whose inner step works with another direction."""

    def __init__(self, step: Step | None = None) -> None:
        self.step = Constant() if step is None else step
        self.initial_lr = self.step.initial_lr

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        """The direction the inner step sees."""
        raise NotImplementedError(type(self).__name__)

    def take(self, local: Local) -> Move:
        inner = replace(
            local,
            solve=lambda damping, about: self.solution(local, damping, about),
            path=lambda: None,
            state=local.state.setdefault("inner", {}),
        )
        return self.step.take(inner)


class Clip(Wrapper):
    """Every entry of the direction is cut to [−bound, bound]."""

    def __init__(self, bound: float, step: Step | None = None) -> None:
        super().__init__(step)
        self.bound = positive("Clip(bound)", bound)

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        found = local.solve(damping, about)
        return replace(found, x=found.x.clamp(-self.bound, self.bound))


class TrustNorm(Wrapper):
    """The move's length in the pullback metric stays below √limit: (lr·x)ᵀG(lr·x) ≤ limit.

    With the Fisher metric this is the KL clip.
    """

    def __init__(self, limit: float, step: Step | None = None) -> None:
        super().__init__(step)
        self.limit = positive("TrustNorm(limit)", limit)

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        found = local.solve(damping, about)
        move = local.scaled(found.x)
        length = float(move @ local.image(move))
        if length <= self.limit:
            return found
        return replace(found, x=found.x * (self.limit / length) ** 0.5)


class Spring(Wrapper):
    r"""Momentum in the null space: x minimizes ‖A x − r‖² + λ‖x − μ x_prev‖².

    The part of the last direction that the current samples say nothing about is kept, the rest
    is solved for.
    """

    def __init__(self, momentum: float = 0.9, step: Step | None = None) -> None:
        super().__init__(step)
        self.momentum = momentum

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        previous = local.state.get("previous")
        if previous is not None and local.state.get("names") == local.names:
            kept = self.momentum * previous.to(local.gradient)
            about = kept if about is None else about + kept
        return local.solve(damping, about)

    def take(self, local: Local) -> Move:
        move = super().take(local)
        if move.accepted:
            local.state["previous"] = move.direction.clone()
            local.state["names"] = local.names
        else:  # no damping shortens it: kept, it would spoil every later step
            local.state.pop("previous", None)
        return move
