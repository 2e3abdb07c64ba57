"""What happened along a solve, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: fields that count steps from the beginning of the run
_STEP_NUMBERS = ("measured", "validated", "moved", "restarted", "settled")
#: fields that count seconds from the beginning of the run
_TIMES = ("seconds", "clock")


@dataclass
class History:
    """One entry per step; the error is measured now and then, so it has steps of its own.

    Attributes:
        loss: before the step.
        seconds: spent in steps so far, measuring not counted.
        damping, trials, accepted: of the step.
        measured: steps taken when the error was measured.
        error: relative L² error then.
        clock: seconds spent then.
        validated: steps taken when the loss was measured at fresh points.
        training_loss: the loss then at the points of the run.
        fresh_loss: the loss then at fresh points.
        moved: steps before which points were moved because the run overfitted them.
        restarted: steps before which a stuck run went on from other parameters.
        settled: steps from which on a run took short steps, at its end or where it was stuck.
    """

    loss: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    damping: list[float] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    validated: list[int] = field(default_factory=list)
    training_loss: list[float] = field(default_factory=list)
    fresh_loss: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    restarted: list[int] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def spent(self) -> float:
        """Seconds in steps."""
        return self.seconds[-1] if self.seconds else 0.0

    @property
    def short_steps(self) -> int | None:
        """Short steps since the run settled, None while it takes long ones.

        Moved points and restarts end the short steps.
        """
        last_settled = max(self.settled, default=-1)
        last_change = max([*self.moved, *self.restarted], default=-1)
        if last_settled <= last_change:
            return None
        return len(self) - last_settled

    def measure(self, error: float) -> None:
        """Add a measured error, after the steps taken so far."""
        if self.measured[-1:] != [len(self)]:
            self.measured.append(len(self))
            self.error.append(error)
            self.clock.append(self.spent)

    def delay(self, seconds: float) -> None:
        """Count so many seconds before the first step, spent on other networks."""
        self.seconds = [s + seconds for s in self.seconds]
        self.clock = [s + seconds for s in self.clock]

    def forget(self, step: int) -> None:
        """Drop an error measured after this step, because the parameters have changed since."""
        if self.measured[-1:] == [step]:
            for values in (self.measured, self.error, self.clock):
                values.pop()

    def validate(self, training_loss: float, fresh_loss: float) -> None:
        """Add the losses at training and fresh points, after the steps taken so far."""
        if self.validated[-1:] != [len(self)]:
            self.validated.append(len(self))
            self.training_loss.append(training_loss)
            self.fresh_loss.append(fresh_loss)

    def seconds_to(self, error: float) -> float | None:
        """Return the seconds until a measured error was at most this, None if it never was."""
        for value, clock in zip(self.error, self.clock, strict=True):
            if value <= error:
                return clock
        return None

    def as_dict(self) -> dict[str, list[Any]]:
        """Return plain lists, to save."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, list[Any]]) -> History:
        """Return the history that `as_dict` described."""
        return cls(**{f.name: list(state[f.name]) for f in fields(cls)})

    def join(self, later: History) -> History:
        """Return this run followed by another, whose steps and seconds are counted from here on."""
        offsets: dict[str, float] = {}
        offsets |= dict.fromkeys(_STEP_NUMBERS, len(self))
        offsets |= dict.fromkeys(_TIMES, self.spent)
        columns: dict[str, list[Any]] = {}
        for column in fields(self):
            values = getattr(later, column.name)
            if column.name in offsets:
                values = [value + offsets[column.name] for value in values]
            columns[column.name] = getattr(self, column.name) + values
        return History(**columns)
