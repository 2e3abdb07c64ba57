"""One optimizer under one reparametrization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import nn

from ..._core.errors import PullbackError
from ..charts.transformations import Twin
from .run import AuditData, Make, RunState, perturb_start, push, run, trainable_parameters
from .table import SLACK, AuditRow, Measure, UpdateMismatch


@dataclass(frozen=True)
class Contender:
    """An optimizer to audit.

    Attributes:
        name: as tables show it.
        make: model ↦ the optimizer, or a list of optimizers that step together.
        about: why its verdicts are what they are, in one line.
        resolution: the relative error that it makes in an update, where it works in lower precision
            or solves to a tolerance. The round-off of parameters is measured.
    """

    name: str
    make: Make
    about: str = ""
    resolution: float = 0.0


def as_contenders(given: Any) -> list[Contender]:
    """One or several, from a function, a contender, a dict of functions or a list of contenders."""
    if isinstance(given, Mapping):
        items = [c if isinstance(c, Contender) else Contender(str(n), c) for n, c in given.items()]
    else:
        several = list(given) if isinstance(given, Sequence) else [given]
        items = [c if isinstance(c, Contender) else Contender(_name(c), c) for c in several]
    alike = len({c.name for c in items}) < len(items)
    if not items or alike or not all(callable(c.make) for c in items):
        raise PullbackError(
            "There is no optimizer to audit",
            f"got {given!r}, where two may not have the same name",
            "Give a function model ↦ optimizer, a dict of such functions, or Contenders",
        )
    return items


def _name(make: Any) -> str:
    name = getattr(make, "__name__", type(make).__name__)
    return "optimizer" if name == "<lambda>" else name


#: a round-off, with its slack, at which larger steps need not be looked at
CLEAR = 1e-3


@dataclass(frozen=True)
class Runs:
    """The runs from one start.

    Attributes:
        small: before and after one step, for each size.
        long: the states of the run of full size.
        push: the step of this number in `small` as a tangent vector.
    """

    small: list[list[RunState]]
    long: list[RunState]
    push: Callable[[int], RunState]


class OptimizerTrial:
    """An optimizer on the original model, to be compared with its runs on twins."""

    def __init__(
        self,
        model: nn.Module,
        contender: Contender,
        setting: AuditData,
        sizes: tuple[float, ...],
        steps: int,
        eps: float,
    ) -> None:
        self.contender, self.setting, self.sizes = contender, setting, sizes
        self.steps, self.eps = steps, eps
        self.mine = self._runs(Twin(model, trainable_parameters))  # f is the identity
        if any(not _gap("batch", s[1], s[0]) > 0 for s in self.mine[0].small):
            raise PullbackError(
                f"{contender.name} does not move the model",
                "after a step the outputs are what they were",
                "Build the optimizer on the model that make_optimizer is given, with lr > 0",
            )

    def compare(self, name: str, twin: Twin) -> AuditRow:
        """The twin's runs beside the original's."""
        runs = (*self.mine, *self._runs(twin, lenient=True))
        first = self.mine[0].long[0]

        def measure(of: str) -> Measure:
            small = zip(*(r.small for r in runs), strict=True)
            steps = [self._step(of, ends[0][0], *(end[1] for end in ends)) for ends in small]
            long = zip(*(r.long[1:] for r in runs), strict=True)
            finite = [self._step(of, first, *ends) for ends in long]
            direction = self._direction(of, runs)
            return Measure(self.sizes, tuple(steps), direction, tuple(finite))

        return AuditRow(
            self.contender.name, name, {place: measure(place) for place in first.places}
        )

    def _runs(self, start: Twin, *, lenient: bool = False) -> tuple[Runs, Runs]:
        """From the start, and from one that is off by round-off."""

        def runs(start: Twin, setting: AuditData) -> Runs:
            go = partial(run, self.contender.make, start, setting, lenient=lenient)
            small = [go(size=size, steps=1) for size in self.sizes]
            pushed = cache(lambda number: push(start, setting, *small[number]))
            return Runs(small, go(size=1.0, steps=self.steps), pushed)

        shifted = perturb_start(start, self.setting, self.eps)
        return runs(start, self.setting), runs(*shifted)

    def _step(self, of: str, start: RunState, *ends: RunState) -> UpdateMismatch:
        """m(η), and the larger of what round-off does to either end, at least to the values."""
        mine, mine_off, theirs, theirs_off = ends
        moved = _gap(of, mine, start)
        shifts = [_gap(of, mine_off, mine), _gap(of, theirs_off, theirs)]
        values = self.eps * float(start.places[of].norm())
        noise = max([values, *filter(math.isfinite, shifts)])
        roundoff = max(_over(noise, moved), self.contender.resolution / SLACK)
        return UpdateMismatch(_over(_gap(of, theirs, mine), moved), roundoff)

    def _direction(self, of: str, runs: Sequence[Runs]) -> UpdateMismatch:
        """m(0), from the smallest step that stands out of round-off."""
        best = UpdateMismatch(math.inf, math.inf)
        for number in reversed(range(len(self.sizes))):
            mine, mine_off, theirs, theirs_off = (r.push(number) for r in runs)
            length = float(mine.places[of].norm())
            shifts = [_gap(of, mine_off, mine), _gap(of, theirs_off, theirs)]
            noise = max([0.0, *filter(math.isfinite, shifts)])
            # a step is known as the difference of two points, which round-off sets
            sizes = [_size(runs[i].small[number][0], runs[i].push(number)) for i in (0, 2)]
            least = max(_over(noise, length), self.eps * max(1.0, *sizes))
            roundoff = max(least, self.contender.resolution / SLACK)
            if roundoff <= best.roundoff:
                best = UpdateMismatch(_over(_gap(of, theirs, mine), length), roundoff)
            if SLACK * best.roundoff <= CLEAR:
                break
        return best


def _size(start: RunState, step: RunState) -> float:
    """‖θ‖/‖Δθ‖."""
    one, two = (
        float(sum(t.double().square().sum() for t in s.theta.values())) ** 0.5
        for s in (start, step)
    )
    return one / two if two > 0 else 1.0


def _gap(of: str, one: RunState, two: RunState) -> float:
    gap = float((one.places[of] - two.places[of]).norm())
    return gap if math.isfinite(gap) else math.inf


def _over(value: float, scale: float) -> float:
    if scale > 0:
        return value / scale
    return 0.0 if value == 0 else math.inf
