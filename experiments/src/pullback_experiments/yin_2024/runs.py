"""One run of one method: the curve, thinned to a few dozen entries; and medians over seeds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..framework.curves import finite, value_at
from .methods import DescentMethod, StepNumbers
from .problems import FitSetting


@dataclass(frozen=True)
class RunLevels:
    """What the words of the claims mean."""

    #: relative error at which a run counts as having got somewhere
    solved: float = 0.1
    #: steps that count as early
    early_steps: int = 30


LEVELS = RunLevels()


@dataclass
class DescentRun:
    """What was measured along a run; entry 0 is the initial network.

    Attributes:
        steps, seconds: so far. Seconds are CPU time, which other processes do not lengthen;
            measuring is not counted.
        loss, error: after that step.
        step_numbers: other numbers about the step, by name, None where there are none.
        stuck: the step from which on nothing changes, or None.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    step_numbers: dict[str, list[float | None]] = field(default_factory=dict)
    stuck: int | None = None

    def add(
        self, step: int, seconds: float, loss: float, error: float, numbers: StepNumbers
    ) -> None:
        """Add one entry."""
        for name in {*self.step_numbers, *numbers}:
            self.step_numbers.setdefault(name, [None] * len(self.steps)).append(
                _short(numbers.get(name))
            )
        self.steps.append(step)
        self.seconds.append(round(seconds, 4))
        self.loss.append(float(f"{loss:.5e}"))
        self.error.append(float(f"{error:.5e}"))

    def values(self, name: str) -> list[float]:
        """Return the entries of `step_numbers` that exist."""
        return [v for v in self.step_numbers.get(name, []) if v is not None]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, to save."""
        return dict(vars(self))


def _short(value: float | None) -> float | None:
    if value is None:
        return None
    return float(f"{value:.5e}")


def entries(steps: int, count: int = 40) -> set[int]:
    """Return the steps after which something is measured, evenly spaced in the logarithm.

    >>> sorted(entries(5))
    [1, 2, 3, 4, 5]
    """
    ratio = max(steps, 1) ** (1 / count)
    return {math.ceil(ratio**i - 1e-9) for i in range(count + 1)} | {steps}


def run(setting: FitSetting, method: DescentMethod, seed: int, steps: int) -> DescentRun:
    """Take at most so many steps from the seed's network; a stuck or lost run ends early.

    A first step on another copy lets torch load what it needs; it is not counted.
    """
    method.on(setting.start(seed)).step()
    fit = setting.start(seed)
    stepper = method.on(fit)
    record = DescentRun()
    record.add(0, 0.0, float(fit.loss().detach()), fit.error(), stepper.probe())
    due = entries(steps)
    spent = 0.0
    for step in range(1, steps + 1):
        start = time.process_time()
        numbers = stepper.step()
        spent += time.process_time() - start
        over = stepper.stuck
        if step in due or over:
            loss = float(fit.loss().detach())
            lost = not math.isfinite(loss)
            if not lost:
                numbers = {**numbers, **stepper.probe()}
            record.add(step, spent, loss, fit.error(), numbers)
            over = over or lost
        if over:
            record.stuck = step
            break
    return record


class Summary:
    """One method over all seeds; a run that was lost counts as infinite."""

    def __init__(self, records: Sequence[DescentRun]) -> None:
        self.records = tuple(records)

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self.records)

    @property
    def stuck(self) -> int:
        """How many of them got stuck."""
        return sum(r.stuck is not None for r in self.records)

    @property
    def errors(self) -> list[float]:
        """The final errors."""
        return [finite(r.error[-1]) for r in self.records]

    @property
    def loss(self) -> float:
        """The median final loss."""
        return self.after(math.inf)

    @property
    def error(self) -> float:
        """The median final error."""
        return statistics.median(self.errors)

    @property
    def per_step(self) -> float:
        """The median time of a step, in seconds."""
        return statistics.median(r.seconds[-1] / r.steps[-1] for r in self.records)

    def after(self, step: float) -> float:
        """The median loss after so many steps."""
        return statistics.median(value_at(r.steps, r.loss, step) for r in self.records)

    def below(self, error: float) -> int:
        """How many runs ended with at most this error."""
        return sum(e <= error for e in self.errors)

    def first(self, name: str) -> float:
        """The median over runs of the first value seen of this name, NaN where there is none."""
        return _median(v[0] for r in self.records if (v := r.values(name)))

    def largest(self, name: str) -> float:
        """The median over runs of the largest value seen of this name."""
        return _median(max(v) for r in self.records if (v := r.values(name)))

    def median(self, name: str) -> float:
        """The median over runs and steps of the values seen of this name."""
        return _median(chain.from_iterable(r.values(name) for r in self.records))


def _median(values: Iterable[float]) -> float:
    ordered = list(values)
    if ordered:
        return statistics.median(ordered)
    return math.nan
