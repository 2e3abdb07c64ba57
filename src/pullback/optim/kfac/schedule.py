"""When statistics are taken and states are refreshed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: what is counted; saved states hold these names
COUNTS = ("step", "taken", "damping", "retry")


@dataclass
class Schedule:
    """Where training stands.

    Attributes:
        statistics_every, refresh_every: steps between statistics and between refreshes.
        warmup: first steps that all take statistics and refresh.
        numbers: steps done, statistics taken, λ, and whether a rejected step asks for a refresh.
            The dict itself is published for checkpoints.
    """

    statistics_every: int
    refresh_every: int
    warmup: int
    numbers: dict[str, Any] = field(
        default_factory=lambda: {"step": 0, "taken": 0, "damping": 0.0, "retry": 0}
    )

    @property
    def step(self) -> int:
        """Steps done."""
        return self.numbers["step"]

    @property
    def statistics_count(self) -> int:
        """How many statistics were taken up."""
        return self.numbers["taken"]

    @property
    def damping(self) -> float:
        """λ in use."""
        return self.numbers["damping"]

    @property
    def asks_again(self) -> bool:
        """Whether the last step was rejected and asks for a refresh with another λ."""
        return bool(self.numbers["retry"])

    @property
    def is_statistics_step(self) -> bool:
        """Whether the step that comes takes statistics."""
        return self.step < self.warmup or self.step % self.statistics_every == 0

    def is_refresh_step(self, count: int) -> bool:
        """Return whether states are refreshed with `count` statistics taken up.

        Until the first `refresh_every` steps are done, also at the first, second, fourth, ...
        """
        if self.step < self.warmup or self.step % self.refresh_every == 0:
            return True
        return self.step < self.refresh_every and count & (count - 1) == 0
