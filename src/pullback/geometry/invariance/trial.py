"""One optimizer under one reparametrization."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from ..._core.errors import PullbackError
from ..charts.transformations import Twin
from .run import RunState, Setting, identity_twin, perturb_start, push, run
from .table import SLACK, AuditRow, Measure, Seen

Make = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Contender:
    """An optimizer to audit.

    Attributes:
        name: as tables show it.
        make: model ↦ the optimizer, or a list of optimizers that step together.
        about: why its verdicts are what they are, in one line.
        resolution: the relative error that it makes in an update, beside the parameters' round-off.
        slack: times round-off that still counts as none.
    """

    name: str
    make: Make
    about: str = ""
    resolution: float | None = None
    slack: float = SLACK


def as_contenders(given: Any) -> list[Contender]:
    """One or several, from a function, a contender, a dict of functions or a list of contenders."""
    if isinstance(given, Contender):
        return [given]
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
    """One twin's runs.

    Attributes:
        small: before and after one step, for each size.
        long: the states of the run of full size.
        off, long_off: the ends of `small`, and `long`, from a start that is off by round-off.
        pushes: the two directions of a step, pushed forward from both starts, by its number.
    """

    small: list[list[RunState]]
    long: list[RunState]
    off: list[RunState]
    long_off: list[RunState]
    pushes: Callable[[int], tuple[RunState, RunState]]


class OptimizerTrial:
    """The original's runs: a step at each size, the steps of full size, and shaken ones."""

    def __init__(
        self,
        model: nn.Module,
        contender: Contender,
        setting: Setting,
        sizes: tuple[float, ...],
        steps: int,
        resolution: float,
    ) -> None:
        self.contender, self.setting, self.sizes = contender, setting, sizes
        self.steps, self.resolution = steps, resolution
        self.mine = self._runs(identity_twin(model))
        if any(not _gap("batch", s[1], s[0]) > 0 for s in self.mine.small):
            raise PullbackError(
                f"{contender.name} does not move the model",
                "after a step the outputs are what they were",
                "Build the optimizer on the model that make_optimizer is given, with lr > 0",
            )

    def compare(self, name: str, twin: Twin) -> AuditRow:
        """The twin's runs beside the original's."""
        theirs = self._runs(twin, lenient=True)

        def measure(of: str) -> Measure:
            small = zip(self.mine.small, theirs.small, strict=True)
            off = zip(self.mine.off, theirs.off, strict=True)
            steps = [self._step(of, s, t[1], o) for (s, t), o in zip(small, off, strict=True)]
            first = self.mine.long[0]
            long = zip(self.mine.long[1:], theirs.long[1:], strict=True)
            off = zip(self.mine.long_off[1:], theirs.long_off[1:], strict=True)
            finite = [self._step(of, (first, s), t, o) for (s, t), o in zip(long, off, strict=True)]
            return Measure(
                self.sizes, tuple(steps), self._direction(of, theirs), tuple(finite),
                self.contender.slack,
            )  # fmt: skip

        places = {place: measure(place) for place in self.mine.long[0].places}
        return AuditRow(self.contender.name, name, places)

    def _runs(self, start: Twin, *, lenient: bool = False) -> Runs:
        make, setting, sizes = self.contender.make, self.setting, self.sizes
        other, shifted = perturb_start(start, setting, self.resolution)
        small = [run(make, start, setting, size=s, steps=1, lenient=lenient) for s in sizes]
        off = [run(make, other, shifted, size=s, steps=1, lenient=lenient) for s in sizes]
        steps = self.steps

        @cache
        def pushes(number: int) -> tuple[RunState, RunState]:
            return push(start, setting, *small[number]), push(start, setting, *off[number])

        return Runs(
            small,
            run(make, start, setting, size=1.0, steps=steps, lenient=lenient),
            [ends[1] for ends in off],
            run(make, other, shifted, size=1.0, steps=steps, lenient=lenient),
            pushes,
        )

    def _step(
        self, of: str, mine: Sequence[RunState], theirs: RunState, off: tuple[RunState, RunState]
    ) -> Seen:
        """m(η), and the larger of what round-off does to either end, at least to the values."""
        moved = _gap(of, mine[1], mine[0])
        shifts = [_gap(of, a, b) for a, b in zip(off, (mine[1], theirs), strict=True)]
        values = self.resolution * float(mine[0].places[of].norm())
        noise = max([values, *filter(math.isfinite, shifts)])
        return Seen(_over(_gap(of, theirs, mine[1]), moved), self._least(_over(noise, moved)))

    def _direction(self, of: str, theirs: Runs) -> Seen:
        """m(0), from the smallest step that stands out of round-off."""
        best = Seen(math.inf, math.inf)
        for number in reversed(range(len(self.sizes))):
            (mine, mine_off), (other, other_off) = self.mine.pushes(number), theirs.pushes(number)
            length = float(mine.places[of].norm())
            shifts = [_gap(of, mine_off, mine), _gap(of, other_off, other)]
            noise = max([0.0, *filter(math.isfinite, shifts)])
            # a step is known as the difference of two points, which round-off sets
            sizes = (_size(r.small[number][0], p) for r, p in ((self.mine, mine), (theirs, other)))
            least = max(_over(noise, length), self.resolution * max(1.0, *sizes))
            found = Seen(_over(_gap(of, other, mine), length), self._least(least))
            if found.roundoff <= best.roundoff:
                best = found
            if self.contender.slack * best.roundoff <= CLEAR:
                break
        return best

    def _least(self, roundoff: float) -> float:
        """An optimizer of lower precision makes a relative error of its own in each update."""
        return max(roundoff, self.contender.resolution or 0.0)


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
