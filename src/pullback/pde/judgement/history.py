"""What happened along a solve, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


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
        own: the loss then at the run's own points.
        fresh: the loss then at fresh ones.
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
    own: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    restarted: list[int] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def spent(self) -> float:
        """Seconds in steps."""
        return self.seconds[-1] if self.seconds else 0.0

    def measure(self, error: float) -> None:
        """One more measurement, after the steps taken so far."""
        if not self.measured or self.measured[-1] != len(self):
            self.measured.append(len(self))
            self.error.append(error)
            self.clock.append(self.spent)

    def forget(self, step: int) -> None:
        """Drop an error measured after this step: the parameters are others."""
        if self.measured and self.measured[-1] == step:
            for values in (self.measured, self.error, self.clock):
                values.pop()

    def validate(self, own: float, fresh: float) -> None:
        """One more look at fresh points, after the steps taken so far."""
        if not self.validated or self.validated[-1] != len(self):
            self.validated.append(len(self))
            self.own.append(own)
            self.fresh.append(fresh)

    def seconds_to(self, error: float) -> float | None:
        """Seconds until a measured error was at most this, None where it never was."""
        for value, clock in zip(self.error, self.clock, strict=True):
            if value <= error:
                return clock
        return None

    def as_dict(self) -> dict[str, list[Any]]:
        """Plain lists, to save."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, list[Any]]) -> History:
        """What `as_dict` gave."""
        return cls(**{f.name: list(state[f.name]) for f in fields(cls)})

    def joined(self, other: History) -> History:
        """This run followed by another."""
        counted = ("measured", "validated", "moved", "restarted", "settled")
        later = {**dict.fromkeys(counted, len(self)), "seconds": self.spent, "clock": self.spent}

        def shifted(name: str) -> list[Any]:
            values = getattr(other, name)
            return [v + later[name] for v in values] if name in later else values

        return History(**{f.name: getattr(self, f.name) + shifted(f.name) for f in fields(self)})
