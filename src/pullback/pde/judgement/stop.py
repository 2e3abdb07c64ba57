"""Why a run ended: the reasons, and the sentence that a user reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class StopReason(StrEnum):
    """Why a run ended; the values are written to files."""

    NOT_STARTED = "not started"
    ALL_STEPS = "all steps"
    TOLERANCE_REACHED = "tolerance reached"
    BUDGET_SPENT = "budget spent"
    STEPS_REJECTED = "steps rejected"
    DIVERGED = "diverged"
    LOSS_LEVEL = "loss level"
    ROUNDOFF_REACHED = "round-off reached"
    ALL_SLABS = "all slabs"
    CALLBACK = "callback"
    SIGNAL = "signal"


#: the sentence of each reason; its number is `Stop.limit`
_SENTENCES = {
    StopReason.NOT_STARTED: "",
    StopReason.ALL_STEPS: "all {:.0f} steps were taken",
    StopReason.TOLERANCE_REACHED: "the tolerance {:g} was reached",
    StopReason.BUDGET_SPENT: "the budget of {:g} s is spent",
    StopReason.STEPS_REJECTED: "{:.0f} steps in a row could not lower the loss",
    StopReason.DIVERGED: (
        "the optimizer diverged within {:.0f} steps, and the network has the parameters of its "
        "lowest loss again"
    ),
    StopReason.LOSS_LEVEL: "the loss fell by less than 1 % in {:.0f} steps",
    StopReason.ROUNDOFF_REACHED: "round-off is reached, and {:.0f} steps changed the loss little",
    StopReason.ALL_SLABS: "all {:.0f} slabs of time were solved",
    StopReason.CALLBACK: "a callback asked for it",
    StopReason.SIGNAL: "a process was interrupted",
}


@dataclass(frozen=True)
class Stop:
    """How a run ended.

    Attributes:
        reason: why.
        limit: the number that the reason speaks of: steps, seconds, or the tolerance.
        tries: how many initial parameters the run tried; it kept the best.
        slab: the number of the slab of time that ended like this, from 1 on; 0 without slabs.
        slabs: how many slabs there are.

    >>> Stop(StopReason.BUDGET_SPENT, 2.5, tries=2).sentence
    'the budget of 2.5 s is spent (the best of 2 tries)'
    """

    reason: StopReason = StopReason.NOT_STARTED
    limit: float = 0.0
    tries: int = 1
    slab: int = 0
    slabs: int = 0

    @property
    def sentence(self) -> str:
        """The reason in words."""
        sentence = _SENTENCES[self.reason].format(self.limit)
        if self.tries > 1:
            sentence += f" (the best of {self.tries} tries)"
        if self.slabs:
            sentence += f" in slab {self.slab} of {self.slabs}"
        return sentence

    @property
    def is_requested(self) -> bool:
        """Return True if the result is as good as was asked for, or the caller ended the run."""
        return self.reason in {StopReason.TOLERANCE_REACHED, StopReason.CALLBACK}

    def with_whole_budget(self, budget: float | None) -> Stop:
        """Return the stop with the budget of a whole solve, where a part of it spent its share."""
        if self.reason is not StopReason.BUDGET_SPENT or budget is None:
            return self
        return replace(self, limit=budget)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, to save."""
        return {**asdict(self), "reason": self.reason.value}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Stop:
        """Return the stop that `as_dict` described."""
        return cls(**{**state, "reason": StopReason(state["reason"])})
