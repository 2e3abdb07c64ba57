"""What one optimizer step did."""

from __future__ import annotations

from dataclasses import dataclass

from .._core.errors import Status
from ..maps import Covered


@dataclass(frozen=True)
class StepInfo:
    """The record of one step; `float(info)` is its loss.

    Attributes:
        loss: the loss before the step.
        accepted: whether the parameters moved.
        step_size: the factor the step rule chose (times the param groups' lr).
        damping: the damping of the solution that was used.
        rank: directions used by the solver, where it knows.
        gram: the form in which the Gram was held.
        rows: n, the rows of A (samples × covectors).
        parameters: p, the columns of A.
        whitened: whether the solve started from r instead of g.
        status: how the solve ended; its value is a sentence.
        reason: why the step was rejected, or empty.
        new_loss: the loss after the step, where the step rule evaluated it.
        trials: evaluations of the loss at trial points.
        coverage: how each parameter's share of the Gram was computed.
    """

    loss: float
    accepted: bool
    step_size: float = 0.0
    damping: float = 0.0
    rank: int | None = None
    gram: str = ""
    rows: int = 0
    parameters: int = 0
    whitened: bool = False
    status: Status = Status.OK
    reason: str = ""
    new_loss: float | None = None
    trials: int = 0
    coverage: tuple[Covered, ...] = ()

    def __float__(self) -> float:
        return self.loss
