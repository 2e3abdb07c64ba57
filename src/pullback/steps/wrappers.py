"""Steps around other steps: they change the direction that the inner step sees."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .._core.checks import require_number
from ..solvers import Damping, Solution
from .base import Constant, Local, Move, Need, Step


class Wrapper(Step):
    """A step whose inner step works with another direction."""

    #: what `solution` uses of `Local`
    own_needs: frozenset[Need] = frozenset()

    def __init__(self, step: Step | None = None) -> None:
        self.inner = Constant() if step is None else step
        self.initial_lr = self.inner.initial_lr

    @property
    def needs(self) -> frozenset[Need]:
        assert self.inner is not None
        return self.own_needs | self.inner.needs

    def solution(self, local: Local, damping: Damping | None, center: Tensor | None) -> Solution:
        """Return the direction that the inner step sees."""
        raise NotImplementedError(type(self).__name__)

    def take(self, local: Local) -> Move:
        assert self.inner is not None
        inner_local = replace(
            local,
            solve=lambda damping, center: self.solution(local, damping, center),
            path=lambda: None,
            state=local.state.setdefault("inner", {}),
        )
        return self.inner.take(inner_local)


class Clip(Wrapper):
    """Every entry of the direction is cut to [−bound, bound]."""

    def __init__(self, bound: float, step: Step | None = None) -> None:
        super().__init__(step)
        require_number("Clip(bound)", bound, positive=True)
        self.bound = bound

    def solution(self, local: Local, damping: Damping | None, center: Tensor | None) -> Solution:
        solution = local.solve(damping, center)
        return replace(solution, x=solution.x.clamp(-self.bound, self.bound))


def clip_factor(squared_length: Tensor, limit: float) -> Tensor:
    """Return min(1, √(limit/squared_length)), which shortens a vector to length √limit at most.

    The device is not waited for; NaN stays NaN.

    >>> clip_factor(torch.tensor([16.0, 0.0]), limit=4.0)
    tensor([0.5000, 1.0000])
    """
    return (limit / squared_length.clamp(min=limit)).sqrt()


class TrustNorm(Wrapper):
    """The move's length in the pullback metric stays below √limit: (lr·x)ᵀG(lr·x) ≤ limit.

    With the Fisher metric this is the KL clip.
    """

    own_needs = frozenset({Need.PRODUCTS})

    def __init__(self, limit: float, step: Step | None = None) -> None:
        super().__init__(step)
        require_number("TrustNorm(limit)", limit, positive=True)
        self.limit = limit

    def solution(self, local: Local, damping: Damping | None, center: Tensor | None) -> Solution:
        solution = local.solve(damping, center)
        factor = clip_factor(local.squared_length(solution.x), self.limit)
        return replace(solution, x=solution.x * factor)


class Spring(Wrapper):
    r"""Momentum in the null space: x minimizes ‖A x − r‖² + λ‖x − μ x_prev‖².

    The part of the last direction that the current samples say nothing about is kept, the rest
    is solved for.
    """

    own_needs = frozenset({Need.CENTER})

    def __init__(self, momentum: float = 0.9, step: Step | None = None) -> None:
        super().__init__(step)
        self.momentum = momentum

    @property
    def numbers(self) -> dict[str, float]:
        return {"count": 0}

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("previous",)

    def solution(self, local: Local, damping: Damping | None, center: Tensor | None) -> Solution:
        if local.state.get("count"):
            previous = self.momentum * local.state["previous"].to(local.gradient)
            center = previous if center is None else center + previous
        return local.solve(damping, center)

    def take(self, local: Local) -> Move:
        move = super().take(local)
        if move.accepted:
            count = local.state.get("count", 0) + 1
            local.state |= {"previous": move.direction.clone(), "count": count}
        else:  # no damping shortens the last direction: kept, it would spoil every later step
            local.state |= {"previous": torch.zeros_like(local.gradient), "count": 0}
        return move
