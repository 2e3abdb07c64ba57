"""Damping that follows the ratio of the actual to the predicted reduction of the loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any

from .._core.checks import require_number
from .._core.errors import require
from .base import Constant, Local, Move, Need, Step, reject

_LEAST_RATIO = 1e-4  # a step is accepted above it: the loss fell by more than round-off


@dataclass(frozen=True)
class RatioDamping:
    """λ after a step, from ρ = actual/predicted reduction of the loss.

    λ ← increase·λ where ρ < low or ρ is NaN, λ ← decrease·λ where ρ > high, both within
    [smallest, largest].

    Defaults: low and high are Fletcher's (1971), the two factors Nielsen's (1999). Below `smallest`
    λ is round-off beside eigenvalues of 1; above `largest` a step along a gradient of 1 is below
    the round-off of float32 parameters of 1.

    >>> RatioDamping().next(1.0, ratio=0.1)
    2.0
    """

    low: float = 0.25
    high: float = 0.75
    increase: float = 2.0
    decrease: float = 1 / 3
    smallest: float = 1e-16
    largest: float = 1e8

    def __post_init__(self) -> None:
        require(
            all(isinstance(value, (int, float)) for value in vars(self).values())
            and 0 <= self.low <= self.high < inf
            and 1 <= self.increase < inf
            and 0 < self.decrease <= 1
            and 0 <= self.smallest <= self.largest < inf,
            "The control of the damping",
            self,
            "Use 0 ≤ low ≤ high, increase ≥ 1, 0 < decrease ≤ 1, 0 ≤ smallest ≤ largest",
        )

    def next(self, damping: float, ratio: float, increase: float | None = None) -> float:
        """Return the next λ; `increase` replaces the factor by which it grows."""
        factor = 1.0
        if not ratio >= self.low:
            factor = self.increase if increase is None else increase
        elif ratio > self.high:
            factor = self.decrease
        return min(max(damping * factor, self.smallest), self.largest)


class LevenbergMarquardt(Step):
    r"""Full steps of the damped system, with λ set by ρ = actual/predicted reduction.

    λ falls by `decrease` where ρ > 0.75, grows by `increase` where ρ < 0.25, and a step that
    raises the loss is rejected and tried again with more damping.

    With a `target` it takes long steps, as `TargetRatio` does, for solvers that factorize for one λ
    at a time: λ falls after every step that is taken, and grows until ρ exceeds the target.

    Args:
        damping: the first λ; afterwards it is part of the optimizer's state.
        step: what becomes of the damped solution: `Constant()`, or `QuadraticModel()` for the best
            combination with the last move. A rejected move leaves its memory alone.
        increase: factor by which λ grows; without a target it doubles with each rejection in a row.
        decrease: factor by which λ falls.
        target: the ratio that suffices, such as 0.01; take `decrease=1 / 16` with it.
        tries: how often to raise λ before the step is given up.
        bounds: λ stays between these.
    """

    def __init__(
        self,
        damping: float = 1e-3,
        step: Step | None = None,
        *,
        increase: float = 2.0,
        decrease: float = 1 / 3,
        target: float | None = None,
        tries: int = 10,
        bounds: tuple[float, float] = (1e-16, 1e8),
    ) -> None:
        require_number("LevenbergMarquardt(damping=...)", damping, positive=True)
        require_number("LevenbergMarquardt(tries=...)", tries, least=1, whole=True)
        is_pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2
        require(is_pair, "LevenbergMarquardt(bounds=...)", bounds, "Use the least and largest λ")
        control = RatioDamping(
            increase=increase, decrease=decrease, smallest=bounds[0], largest=bounds[1]
        )
        if target is not None:
            require_number("LevenbergMarquardt(target=...)", target, below=1, positive=True)
            control = replace(control, low=target, high=target)
        self.damping = damping
        self.inner = Constant() if step is None else step
        self.initial_lr = self.inner.initial_lr
        self.target = target
        self.control = control
        self.tries = tries

    @property
    def needs(self) -> frozenset[Need]:
        assert self.inner is not None
        return frozenset({Need.LOSSES, Need.PRODUCTS, Need.DAMPINGS}) | self.inner.needs

    @property
    def numbers(self) -> dict[str, float]:
        return {"damping": self.damping}

    def take(self, local: Local) -> Move:
        damping = local.state.get("damping", self.damping)
        least_ratio = _LEAST_RATIO if self.target is None else self.target
        increase = self.control.increase
        move = None
        for trial in range(1, self.tries + 1):
            move, inner_state = self._damped_move(local, damping)
            ratio = nan
            if move.accepted:
                displacement = move.size * move.direction
                loss = local.loss_at(displacement)
                ratio = local.reduction_ratio(displacement, loss)
                if ratio > least_ratio:
                    local.state["damping"] = self.control.next(
                        move.solution.damping, ratio, increase
                    )
                    local.state["inner"] = inner_state
                    return replace(move, loss=loss, trials=trial)
                reason = "the loss did not fall far enough at any damping tried"
                move = reject(move.solution, reason, trial)
            damping = self.control.next(damping, ratio, increase)
            if self.target is None:
                increase *= 2
        local.state["damping"] = damping
        assert move is not None
        return move

    def _damped_move(self, local: Local, damping: float) -> tuple[Move, dict[str, Any]]:
        """Return the inner step's move at this damping, and its state after the move."""
        assert self.inner is not None
        inner_state = dict(local.state.get("inner", {}))
        inner_local = replace(
            local,
            solve=lambda _, center: local.solve(damping, center),
            path=lambda: None,
            state=inner_state,
        )
        return self.inner.take(inner_local), inner_state
