"""One run of one method: the curve, thinned to a few dozen entries."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

from .methods import Method, Seen
from .problems import Setting

_ENTRIES = 40  # of a curve


@dataclass
class Record:
    """What was measured along a run; entry 0 is the initial network.

    Attributes:
        steps, seconds: so far. Seconds are CPU time, which other processes do not lengthen;
            measuring is not counted.
        loss, error: after that step.
        seen: other numbers about the step, by name, None where there are none.
        stuck: the step from which on nothing changes, or None.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    seen: dict[str, list[float | None]] = field(default_factory=dict)
    stuck: int | None = None

    def add(self, step: int, seconds: float, loss: float, error: float, seen: Seen) -> None:
        """One more entry."""
        for name in {*self.seen, *seen}:
            self.seen.setdefault(name, [None] * len(self.steps)).append(_short(seen.get(name)))
        self.steps.append(step)
        self.seconds.append(round(seconds, 4))
        self.loss.append(float(f"{loss:.5e}"))
        self.error.append(float(f"{error:.5e}"))

    def values(self, name: str) -> list[float]:
        """The entries of `seen` that are there."""
        return [v for v in self.seen.get(name, []) if v is not None]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, to save."""
        return dict(vars(self))


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5e}")


def entries(steps: int) -> set[int]:
    """The steps after which something is measured: evenly spaced in the logarithm.

    >>> sorted(entries(5))
    [1, 2, 3, 4, 5]
    """
    ratio = max(steps, 1) ** (1 / _ENTRIES)
    return {math.ceil(ratio**i - 1e-9) for i in range(_ENTRIES + 1)} | {steps}


def run(setting: Setting, method: Method, seed: int, steps: int) -> Record:
    """At most so many steps from the seed's network; a run that is stuck or lost ends early.

    A first step on another copy lets torch load what it needs; it is not counted.
    """
    method.on(setting.start(seed)).step()
    fit = setting.start(seed)
    stepper = method.on(fit)
    record = Record()
    record.add(0, 0.0, float(fit.loss().detach()), fit.error(), stepper.probe())
    due, spent = entries(steps), 0.0
    for step in range(1, steps + 1):
        start = time.process_time()
        seen = stepper.step()
        spent += time.process_time() - start
        over = stepper.stuck
        if step in due or over:
            loss = float(fit.loss().detach())
            lost = not math.isfinite(loss)
            record.add(
                step, spent, loss, fit.error(), seen if lost else {**seen, **stepper.probe()}
            )
            over = over or lost
        if over:
            record.stuck = step
            break
    return record
