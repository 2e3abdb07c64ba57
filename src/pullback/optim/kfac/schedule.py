"""When statistics are taken and states are refreshed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: the keys of `Schedule.numbers`, which saved states hold
COUNTS = ("step", "taken", "damping", "retry")


@dataclass
class Schedule:
    """Counts of steps and statistics, and which steps take statistics or refresh states.

    Attributes:
        statistics_every, refresh_every: steps between statistics and between refreshes.
        warmup: w, the first steps that all take statistics and refresh. After them gaps grow as
            steps/w until they are those above.
        numbers: steps done ("step"), statistics taken ("taken"), λ ("damping"), and 1 where a
            rejected step asks for a refresh ("retry"). The dict itself is published for
            checkpoints; all others read and change it by the properties and methods below.
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

    @damping.setter
    def damping(self, value: float) -> None:
        self.numbers["damping"] = value

    @property
    def should_refresh_again(self) -> bool:
        """Whether a rejected step asks for a refresh: with another λ, or since it took none."""
        return bool(self.numbers["retry"])

    @should_refresh_again.setter
    def should_refresh_again(self, value: bool) -> None:
        self.numbers["retry"] = int(value)

    def count_step(self) -> None:
        """Count a step that was taken."""
        self.numbers["step"] += 1

    def uncount_step(self) -> None:
        """Take back the count of a step that turned out not to have moved the parameters."""
        self.numbers["step"] -= 1

    def count_statistics(self) -> None:
        """Count statistics that entered the averages."""
        self.numbers["taken"] += 1

    def uncount_statistics(self) -> None:
        """Take back the count of statistics that turned out not to be finite."""
        self.numbers["taken"] -= 1

    @property
    def is_statistics_step(self) -> bool:
        """Whether the next step takes statistics: one in `statistics_every`, more at the start.

        After a warm-up of w steps the gap between statistics grows as steps/w until it is
        `statistics_every`: factors change fastest at the start of training.
        """
        if self.step < self.warmup or self.step % self.statistics_every == 0:
            return True
        has_short_gap = self.step < self.warmup * self.statistics_every
        return has_short_gap and self.step % (self.step // self.warmup) == 0

    def is_refresh_step(self, statistics_count: int) -> bool:
        """Return whether this step refreshes states: one in `refresh_every`, more at the start.

        `statistics_count` is the number of statistics in the averages, those of this step included.

        With a warm-up of w steps the gap between refreshes grows as that between statistics does,
        until it is `refresh_every`. Otherwise, until the first `refresh_every` steps are done, also
        at the first, second, fourth, ...
        """
        if self.step % self.refresh_every == 0:
            return True
        if self.step < self.warmup * self.refresh_every:
            gap = max(1, self.step // (self.warmup * self.statistics_every))
            return (self.step // self.statistics_every) % gap == 0
        return self.step < self.refresh_every and statistics_count & (statistics_count - 1) == 0
