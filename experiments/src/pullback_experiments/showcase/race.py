"""Equal time for every optimizer: train until the budget is spent, and keep the curve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..framework.curves import finite
from .problem import Competitor, DemoProblem, Stepper


@dataclass(frozen=True)
class MeasurementTimes:
    """When a run is measured, and when it is shown."""

    #: the first measurement, as a share of the budget
    first: float = 2e-3
    #: ratio of the times of two measurements
    spacing: float = 1.12
    #: seconds between two calls of the watcher
    refresh: float = 0.1


TIMES = MeasurementTimes()

#: called with (share of the budget spent, last loss)
Watcher = Callable[[float, float], None]


@dataclass
class Curve:
    """What was measured along one run, entry 0 at the initial model, and the model at its end.

    A curve that comes from a file has no model.
    """

    name: str
    model: nn.Module | None = None
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    measures: list[dict[str, float]] = field(default_factory=list)

    def add(self, seconds: float, steps: int, measures: dict[str, float]) -> None:
        """Add one point."""
        self.seconds.append(seconds)
        self.steps.append(steps)
        self.measures.append(measures)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, to save."""
        return {"seconds": self.seconds, "steps": self.steps, "measures": self.measures}

    @classmethod
    def of(cls, name: str, record: Mapping[str, Any]) -> Curve:
        """What `as_dict` gave."""
        return cls(name, None, record["seconds"], record["steps"], record["measures"])

    def values(self) -> list[float]:
        """Return the first measure along the run."""
        return [next(iter(m.values())) for m in self.measures]


def run(
    problem: DemoProblem,
    contender: Competitor,
    *,
    seconds: float,
    watch: Watcher,
    **settings: float,
) -> Curve:
    """Train from the problem's initial model until `seconds` are spent in steps.

    These are seconds of the CPU, so that a busy machine slows the race and does not bend it.
    Drawing the batch counts as part of a step; measuring does not, nor a first step on a copy
    that lets torch load what it needs. A run whose loss is not finite ends there.
    """
    _, warm_up = _fresh(problem, contender, settings)
    warm_up()
    model, step = _fresh(problem, contender, settings)
    curve = Curve(contender.name, model)
    curve.add(0.0, 0, problem.measure(model))
    spent = 0.0
    steps = 0
    due = TIMES.first * seconds
    shown = 0.0
    while spent < seconds:
        start = time.process_time()
        loss = step()
        spent = spent + time.process_time() - start
        steps = steps + 1
        over = spent >= seconds or not math.isfinite(loss)
        if spent >= due or over:
            curve.add(spent, steps, problem.measure(model))
            due = spent * TIMES.spacing
        if spent >= shown or over:
            shown = spent + TIMES.refresh
            if not over:
                watch(spent / seconds, loss)
        if over:
            watch(1.0, loss)
            break
    return curve


def tune(
    problem: DemoProblem, contender: Competitor, *, seconds: float
) -> list[tuple[dict[str, float], float]]:
    """Return every point of the contender's grid with its final measure, best first."""
    ends = []
    for settings in contender.candidates():
        curve = run(problem, contender, seconds=seconds, watch=lambda *_: None, **settings)
        final = curve.values()[-1]
        ends.append((settings, finite(final)))
    return sorted(ends, key=lambda end: end[1])


def _fresh(
    problem: DemoProblem, contender: Competitor, settings: dict[str, float]
) -> tuple[nn.Module, Stepper]:
    model = problem.model()
    return model, problem.stepper(contender, model, contender(model, **settings))
