"""Points that a run overfits move to where residuals are large."""

from __future__ import annotations

from dataclasses import dataclass

from ..judgement.verdict import is_overfitted
from .context import Losses, RunContext


@dataclass(frozen=True)
class DriftLevels:
    """When points move."""

    #: loss at fresh points over that at the run's own: a factor of two says that points are few
    ratio: float = 2.0
    #: share of the first loss below which that ratio does not count: the end is near by then
    early_share: float = 1e-8
    #: share of the first loss below which even overfitted points stay: round-off is near
    late_share: float = 1e-12


LEVELS = DriftLevels()


class PointMoves:
    """Moves half of the equations' points to where their residuals are large."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def are_needed(self, losses: Losses) -> bool:
        """Return True if the run overfits its points.

        While the loss is large a ratio of two is enough; later it takes one of ten.
        """
        first = self._context.history.loss[0]
        is_early = losses.fresh > LEVELS.early_share * first
        if is_early and losses.fresh > LEVELS.ratio * losses.training:
            return True
        is_late = losses.fresh <= LEVELS.late_share * first
        return is_overfitted(losses.training, losses.fresh) and not is_late

    def move(self) -> None:
        """Move the points before the next step."""
        history = self._context.history
        self._context.points.concentrate(len(history))
        history.moved.append(len(history))
