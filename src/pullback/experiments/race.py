"""Equal time for every optimizer: train until the budget is spent, and keep the curve."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .contender import Contender
from .problem import Problem

_SPACING = 1.12  # ratio of the times of two measurements
_FIRST = 2e-3  # the first one, as a share of the budget

#: called with (share of the budget spent, last loss)
Watcher = Callable[[float, float], None]


@dataclass
class Curve:
    """What was measured along one run; entry 0 is the initial model."""

    name: str
    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    measures: list[dict[str, float]] = field(default_factory=list)

    def add(self, seconds: float, steps: int, measures: dict[str, float]) -> None:
        """One more point."""
        self.seconds.append(seconds)
        self.steps.append(steps)
        self.measures.append(measures)

    def values(self) -> list[float]:
        """The measure that counts, along the run."""
        return [next(iter(m.values())) for m in self.measures]


def run(
    problem: Problem, contender: Contender, *, seconds: float, watch: Watcher, **settings: float
) -> Curve:
    """Train from the problem's initial model until `seconds` are spent in steps.

    Drawing the batch counts as part of a step; measuring does not. A run whose loss is not
    finite ends there.
    """
    model = problem.model()
    optimizer = contender(model, **settings)
    curve = Curve(contender.name)
    curve.add(0.0, 0, problem.measure(model))
    spent, due, loss = 0.0, _FIRST * seconds, math.inf
    for steps, batch in enumerate(_batches(problem, contender), start=1):
        start = time.perf_counter()
        loss = _step(problem, model, optimizer, *batch())
        spent += time.perf_counter() - start
        over = spent >= seconds or not math.isfinite(loss)
        if spent >= due or over:
            curve.add(spent, steps, problem.measure(model))
            due = spent * _SPACING
            watch(min(spent / seconds, 1.0), loss)
        if over:
            break
    return curve


def tune(
    problem: Problem, contender: Contender, *, seconds: float, watch: Watcher
) -> dict[str, float]:
    """The settings of the contender's grid that end with the smallest measure."""
    ends = []
    for settings in contender.candidates():
        curve = run(problem, contender, seconds=seconds, watch=watch, **settings)
        final = curve.values()[-1]
        ends.append((final if math.isfinite(final) else math.inf, settings))
    return min(ends, key=lambda end: end[0])[1]


def _batches(
    problem: Problem, contender: Contender
) -> Iterator[Callable[[], tuple[Tensor, Tensor]]]:
    """The same sequence of batches for all contenders with the same batch size."""
    x, y, size = problem.x, problem.y, contender.batch
    generator = torch.Generator().manual_seed(0)

    def draw() -> tuple[Tensor, Tensor]:
        if size is None:
            return x, y
        chosen = torch.randint(len(x), (size,), generator=generator)
        return x[chosen], y[chosen]

    while True:
        yield draw


def _step(problem: Problem, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = problem.loss(model(x), y)
        loss.backward()
        return loss.detach()

    return float(optimizer.step(closure))  # pyright: ignore[reportArgumentType, reportCallIssue]
