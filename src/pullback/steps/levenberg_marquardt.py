"""Levenberg–Marquardt: damping that follows the model's reliability."""

from __future__ import annotations

from .base import Local, Move, Step, failed, positive
from .trust import RatioDamping


class LevenbergMarquardt(Step):
    r"""Full steps of the damped system, with λ set by ρ = actual/predicted reduction.

    λ falls by `decrease` where ρ > 0.75, grows by `increase` where ρ < 0.25, and a step that
    raises the loss is rejected and tried again with more damping.

    Args:
        damping: the first λ; afterwards it is part of the optimizer's state.
        increase: factor by which λ grows; it doubles with each rejection in a row.
        decrease: factor by which λ falls.
        tries: how often to raise λ before the step is given up.
        bounds: λ stays between these.
    """

    def __init__(
        self,
        damping: float = 1e-3,
        *,
        increase: float = 2.0,
        decrease: float = 1 / 3,
        tries: int = 10,
        bounds: tuple[float, float] = (1e-16, 1e8),
    ) -> None:
        self.damping = positive("LevenbergMarquardt(damping=...)", damping)
        self.control = RatioDamping(
            increase=increase, decrease=decrease, smallest=bounds[0], largest=bounds[1]
        )
        self.tries = positive("LevenbergMarquardt(tries=...)", tries)

    @property
    def numbers(self) -> dict[str, float]:
        return {"damping": self.damping}

    def take(self, local: Local) -> Move:
        damping = local.state.get("damping", self.damping)
        growth = self.control.increase
        move = None
        for trial in range(1, self.tries + 1):
            solution = local.direction(damping)
            move, ratio = failed(solution), float("nan")
            if move is None:
                loss = local.loss_at(solution.x)
                predicted = local.predicted(solution.x)
                ratio = (local.loss - loss) / predicted if predicted > 0 else ratio
                if ratio > 1e-4:
                    local.state["damping"] = self.control.next(solution.damping, ratio, growth)
                    return Move(solution.x, 1.0, solution, True, loss, "", trial)
                reason = "the loss did not fall at any damping tried"
                move = Move(solution.x, 0.0, solution, False, None, reason, trial)
            damping = self.control.next(damping, ratio, growth)
            growth *= 2
        local.state["damping"] = damping
        assert move is not None
        return move
