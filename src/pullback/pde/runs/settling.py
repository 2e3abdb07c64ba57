"""The last steps of a run are short, and lead down to the floor of its valley."""

from __future__ import annotations

from dataclasses import dataclass

from .context import RunContext


@dataclass(frozen=True)
class SettlingThresholds:
    """How long a run settles."""

    #: short steps at the end of a run, and where it is stuck
    steps: int = 10
    #: at most one in so many steps of a run is short: the others make the progress
    one_in: int = 10


THRESHOLDS = SettlingThresholds()


class Settling:
    """Short steps, whose predicted reductions of the loss come true.

    The longest step that lowers the loss at all leads along the walls of a valley: what the loss
    then shows is the error of that step, not the distance from the solution. Residuals of short
    steps are in float64, as when a linear system is refined.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context

    @property
    def step_count(self) -> int:
        """Short steps that the run settles for."""
        share = self._context.settings.limits.steps // THRESHOLDS.one_in
        return max(1, min(THRESHOLDS.steps, share))

    @property
    def is_in_progress(self) -> bool:
        """Return True while short steps are taken."""
        short_steps = self._context.history.short_steps
        return short_steps is not None and short_steps < self.step_count

    @property
    def is_complete(self) -> bool:
        """Return True if all short steps were just taken."""
        return self._context.history.short_steps == self.step_count

    @property
    def is_at_end(self) -> bool:
        """Return True if only the steps to settle are left."""
        return self._context.steps_left <= self.step_count

    def can_begin(self) -> bool:
        """Return True if the run takes long steps, whose length it chooses, at fixed points."""
        context = self._context
        if context.history.short_steps is not None:
            return False
        is_at_fixed_points = context.collocation.can_compare_losses(len(context.history))
        return context.settings.method.chooses_step and is_at_fixed_points

    def begin(self) -> None:
        """Take short steps from now on."""
        history = self._context.history
        history.settled.append(len(history))
