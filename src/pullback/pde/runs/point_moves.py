"""Points that a run overfits move to where residuals are large."""

from __future__ import annotations

from dataclasses import dataclass

from ..judgement.verdict import is_overfitted
from .context import Losses, RunContext


@dataclass(frozen=True)
class DriftThresholds:
    """When points move."""

    #: loss at fresh points over that at the run's own beyond which they move, far from a solution:
    #: sums over 1,000 points or more differ by a tenth, so twice is no accident
    ratio: float = 2.0
    #: share of the first loss below which even overfitted points stay: residuals have fallen by
    #: six digits, and round-off is near
    late_share: float = 1e-12


THRESHOLDS = DriftThresholds()


class PointMoves:
    """Moves half of the equations' points to where their residuals are large."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def are_needed(self, losses: Losses) -> bool:
        """Return True if the run overfits its points.

        Far from a solution a ratio of two is enough; near it takes one of ten.
        """
        first = self._context.history.loss[0]
        is_far = not self._context.is_near_solution(losses.fresh)
        if is_far and losses.fresh > THRESHOLDS.ratio * losses.training:
            return True
        is_late = losses.fresh <= THRESHOLDS.late_share * first
        return is_overfitted(losses.training, losses.fresh) and not is_late

    def move(self) -> None:
        """Move the points before the next step."""
        history = self._context.history
        self._context.collocation.concentrate(len(history))
        history.moved.append(len(history))
