"""When a run ends: its limits are reached, or the loss falls no further."""

from __future__ import annotations

from ..judgement.stop import Stop, StopReason
from .context import THRESHOLDS, RunContext

#: the fall of the loss, as a share, that `patience` waits for
PATIENCE_FALL = 0.01


class StopRules:
    """The reasons for which a run ends by itself."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def check_limits(self) -> Stop | None:
        """Return the limit that is reached: steps, tolerance or budget; None if none is."""
        context = self._context
        limits = context.settings.limits
        if len(context.history) >= context.share * limits.steps:
            return Stop(StopReason.ALL_STEPS, limits.steps)
        if limits.tol is not None and self._reaches_tolerance(limits.tol):
            return Stop(StopReason.TOLERANCE_REACHED, limits.tol)
        if limits.budget is not None and self._exhausts_budget(limits.budget):
            return Stop(StopReason.BUDGET_SPENT, limits.budget)
        return None

    def check_stagnation(self) -> Stop | None:
        """Return why no more is to be expected, None if the loss still falls."""
        context = self._context
        patience = context.settings.limits.patience
        if patience is not None and context.is_level_at_roundoff:
            return Stop(StopReason.ROUNDOFF_REACHED, THRESHOLDS.roundoff_steps)
        if context.rejects_all_steps:
            return Stop(StopReason.STEPS_REJECTED, THRESHOLDS.rejected_steps)
        if patience is not None and context.has_level_loss(patience, PATIENCE_FALL):
            return Stop(StopReason.LOSS_LEVEL, patience)
        return None

    def _reaches_tolerance(self, tolerance: float) -> bool:
        """Return True if the error is small enough; the loss, where no solution is known."""
        context = self._context
        history = context.history
        if history.error:
            return history.error[-1] <= tolerance
        if not history.loss or history.loss[-1] > tolerance:
            return False
        if not context.collocation.is_least_squares:
            return True
        return context.validation.loss(len(history)) <= tolerance

    def _exhausts_budget(self, budget: float) -> bool:
        """Return True if the seconds of this call are spent."""
        context = self._context
        share = context.share
        if context.is_resumable:  # the run goes on from its checkpoint when it is called again
            share = 1.0
        return context.seconds_spent + context.seconds_elsewhere >= share * budget
