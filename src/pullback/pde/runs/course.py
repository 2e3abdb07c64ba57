"""Which phase comes next: go on, weigh priors, settle, move points, or restart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .context import RunContext
from .descent import Descent
from .restarts import Restarts
from .settling import Settling


@dataclass(frozen=True)
class CourseThresholds:
    """When the course of a run changes; falls are shares of the loss."""

    #: steps, and the fall in them, below which the weight of a prior is chosen again: at 5 % in ten
    #: steps a loss takes 450 steps for one digit, more than a run has
    prior_steps: int = 10
    prior_fall: float = 0.05
    #: the fall in half of `patience` below which a run is stuck, far from a solution: as in the
    #: verdict, less than 1 % is not progress
    far_fall: float = 0.01
    #: the same near a solution, where losses fall quickly: they should halve in these steps
    near_fall: float = 0.5


THRESHOLDS = CourseThresholds()


class Course:
    """Changes the phase of a run between two steps.

    A run takes long steps (`Descent`) until it is stuck or near its end. Then it settles, and where
    it is stuck it moves its points or restarts from other parameters. Every phase is an object of
    its own; `change` has their order.

    Args:
        context: what the phases share.
        descent: takes the steps.
        collect_state: returns all that the next step depends on.

    Attributes:
        settling: the phase of short steps.
        restarts: the phase of other parameters, which knows the best ones.
        state_before_settling: of the run, from which it goes on when it is given more steps.
    """

    def __init__(
        self, context: RunContext, descent: Descent, collect_state: Callable[[], dict[str, Any]]
    ) -> None:
        self._context = context
        self._descent = descent
        self._collect_state = collect_state
        self.settling = Settling(context)
        self.restarts = Restarts(context)
        self.state_before_settling: dict[str, Any] | None = None

    def change(self) -> bool:
        """Begin another phase if it is time, and return True if the run goes on.

        It goes on if a phase begins, and while short steps are taken. Otherwise the return value is
        False, and `StopRules` decide.
        """
        if self._weigh_priors() or self.settling.is_in_progress:
            return True
        is_stuck = self._is_stuck()
        if (is_stuck or self.settling.is_at_end) and self._settle():
            return True
        has_patience = self._context.settings.limits.patience is not None
        if has_patience and (is_stuck or self.settling.is_complete):
            return self._leave_plateau()
        return False

    def _is_stuck(self) -> bool:
        """Return True if the loss hardly fell in half of the patience."""
        context = self._context
        patience = context.settings.limits.patience
        if patience is None:
            return False
        loss = context.history.loss
        fall = THRESHOLDS.far_fall
        if loss and context.is_near_solution(loss[-1]):
            fall = THRESHOLDS.near_fall
        return context.is_stagnant(max(1, patience // 2), fall)

    def _weigh_priors(self) -> bool:
        """Choose the weights of priors again once the loss is level; return True if they changed.

        Losses before and after do not compare, so the best try is forgotten.
        """
        context = self._context
        if not context.is_stagnant(THRESHOLDS.prior_steps, THRESHOLDS.prior_fall):
            return False
        if not context.collocation.reweigh(len(context.history)):
            return False
        context.validation.weights = context.collocation.weights
        context.rejected_steps = 0
        self.restarts.best = None
        return True

    def _settle(self) -> bool:
        """Take short steps from now on, if the run can; return True if it does."""
        if not self.settling.can_begin():
            return False
        if self._context.is_resumable and self.settling.is_at_end:
            self.state_before_settling = self._collect_state()
        self.settling.begin()
        self._descent.renew_optimizer()
        return True

    def _leave_plateau(self) -> bool:
        """Move the points or kick the parameters if that may help; return True if one was done.

        Points move if they are overfitted. Otherwise the parameters are kicked out of a narrow
        valley, as long as that lowers the loss at fresh points. A run that is far from a solution
        starts anew.
        """
        context = self._context
        if not context.can_adapt or not context.collocation.is_least_squares:
            return False
        losses = context.measure_losses()
        if not context.exceeds_roundoff(losses.fresh):
            return False
        if self._descent.point_moves.are_needed(losses):
            self._descent.move_points()
            return True
        if not self.restarts.begin(losses):
            return False
        self._descent.renew_optimizer()
        return True
