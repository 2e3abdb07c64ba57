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
from .run import AuditData, Make, RunState, list_trained, perturb_start, push, run
from .table import THRESHOLDS, AuditRow, Measure, UpdateMismatch


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


def as_contenders(optimizers: Any) -> list[Contender]:
    """Return one or several, from a function, a contender, a dict of functions or a list."""
    if isinstance(optimizers, Mapping):
        contenders = [_as_contender(make, str(name)) for name, make in optimizers.items()]
    elif isinstance(optimizers, Sequence):
        contenders = [_as_contender(make, _find_name(make)) for make in optimizers]
    else:
        contenders = [_as_contender(optimizers, _find_name(optimizers))]
    names = {contender.name for contender in contenders}
    are_callable = all(callable(contender.make) for contender in contenders)
    if not contenders or len(names) < len(contenders) or not are_callable:
        raise PullbackError(
            "There is no optimizer to audit",
            f"got {optimizers!r}, where two may not have the same name",
            "Give a function model ↦ optimizer, a dict of such functions, or Contenders",
        )
    return contenders


def _as_contender(optimizer: Any, name: str) -> Contender:
    """Return a contender itself, or a function under this name."""
    if isinstance(optimizer, Contender):
        return optimizer
    return Contender(name, optimizer)


def _find_name(make: Any) -> str:
    name = getattr(make, "__name__", type(make).__name__)
    return "optimizer" if name == "<lambda>" else name


@dataclass(frozen=True)
class TrialPlan:
    """The runs of a trial.

    Attributes:
        sizes: multiples of the optimizer's lr for one small step, largest first.
        steps: of the run of full size.
        eps: the round-off of the parameters.
    """

    sizes: tuple[float, ...]
    steps: int
    eps: float


@dataclass(frozen=True)
class Runs:
    """The runs from one start.

    Attributes:
        small: before and after one step, for each size.
        long: the states of the run of full size.
        push: returns the step of this number in `small` as a tangent vector.
    """

    small: list[list[RunState]]
    long: list[RunState]
    push: Callable[[int], RunState]


@dataclass(frozen=True)
class RunPair:
    """Runs from a start, and from one that is off by round-off."""

    exact: Runs
    perturbed: Runs


@dataclass(frozen=True)
class _Comparison:
    """States or tangent vectors of four runs at the same time."""

    original: RunState
    original_perturbed: RunState
    twin: RunState
    twin_perturbed: RunState

    def find_mismatch(self, quantity: str) -> float:
        """Return the distance of the twin from the original."""
        return _find_distance(quantity, self.twin, self.original)

    def find_noise(self, quantity: str) -> float:
        """Return the larger of what round-off does to either run."""
        distances = [
            _find_distance(quantity, self.original_perturbed, self.original),
            _find_distance(quantity, self.twin_perturbed, self.twin),
        ]
        return max([0.0, *filter(math.isfinite, distances)])


class OptimizerTrial:
    """An optimizer on the original model, to be compared with its runs on twins."""

    def __init__(
        self, model: nn.Module, contender: Contender, setting: AuditData, plan: TrialPlan
    ) -> None:
        self.contender = contender
        self.setting = setting
        self.plan = plan
        self.original = self._run(Twin(model, list_trained))  # f is the identity
        for before, after in self.original.exact.small:
            if _find_distance("batch", after, before) > 0:
                continue
            raise PullbackError(
                f"{contender.name} does not move the model",
                "after a step the outputs are what they were",
                "Build the optimizer on the model that make_optimizer is given, with lr > 0",
            )

    def compare(self, name: str, twin: Twin) -> AuditRow:
        """Return the mismatches of the twin's runs with the original's."""
        runs = self._run(twin, lenient=True)
        quantities = self.original.exact.long[0].values
        measures = {quantity: self._measure(quantity, runs) for quantity in quantities}
        return AuditRow(self.contender.name, name, measures)

    def _run(self, start: Twin, *, lenient: bool = False) -> RunPair:
        """Run from the start, and from one that is off by round-off."""
        exact = self._run_once(start, self.setting, lenient)
        perturbed_start, perturbed_setting = perturb_start(start, self.setting, self.plan.eps)
        return RunPair(exact, self._run_once(perturbed_start, perturbed_setting, lenient))

    def _run_once(self, start: Twin, setting: AuditData, lenient: bool) -> Runs:
        run_from_start = partial(run, self.contender.make, start, setting, lenient=lenient)
        small = [run_from_start(size=size, steps=1) for size in self.plan.sizes]
        push_step = cache(lambda number: push(start, setting, *small[number]))
        return Runs(small, run_from_start(size=1.0, steps=self.plan.steps), push_step)

    def _measure(self, quantity: str, twin: RunPair) -> Measure:
        """Return the mismatches of one quantity."""
        start = self.original.exact.long[0]
        steps = []
        for number, (before, _) in enumerate(self.original.exact.small):
            ends = self._compare_states(twin, lambda runs, number=number: runs.small[number][1])
            steps.append(self._find_step_mismatch(quantity, before, ends))
        finite = []
        for step in range(1, self.plan.steps + 1):
            ends = self._compare_states(twin, lambda runs, step=step: runs.long[step])
            finite.append(self._find_step_mismatch(quantity, start, ends))
        direction = self._find_direction_mismatch(quantity, twin)
        return Measure(self.plan.sizes, tuple(steps), direction, tuple(finite))

    def _compare_states(self, twin: RunPair, select: Callable[[Runs], RunState]) -> _Comparison:
        """Return the states that are selected from all four runs."""
        return _Comparison(
            select(self.original.exact),
            select(self.original.perturbed),
            select(twin.exact),
            select(twin.perturbed),
        )

    def _find_step_mismatch(
        self, quantity: str, start: RunState, ends: _Comparison
    ) -> UpdateMismatch:
        """Return m(η); round-off moves the values themselves at least by ε."""
        length = _find_distance(quantity, ends.original, start)
        value_noise = self.plan.eps * float(start.values[quantity].norm())
        noise = max(value_noise, ends.find_noise(quantity))
        roundoff = max(_divide(noise, length), self._resolution)
        return UpdateMismatch(_divide(ends.find_mismatch(quantity), length), roundoff)

    def _find_direction_mismatch(self, quantity: str, twin: RunPair) -> UpdateMismatch:
        """Return m(0), from the smallest step that stands out of round-off."""
        best = UpdateMismatch(math.inf, math.inf)
        for number in reversed(range(len(self.plan.sizes))):
            pushed = self._compare_states(twin, lambda runs, number=number: runs.push(number))
            length = float(pushed.original.values[quantity].norm())
            # A step is known as the difference of two points, which have round-off of their own.
            step_noise = self.plan.eps * max(
                1.0,
                _relate_to_step(self.original.exact.small[number][0], pushed.original),
                _relate_to_step(twin.exact.small[number][0], pushed.twin),
            )
            noise = _divide(pushed.find_noise(quantity), length)
            roundoff = max(noise, step_noise, self._resolution)
            if roundoff <= best.roundoff:
                best = UpdateMismatch(_divide(pushed.find_mismatch(quantity), length), roundoff)
            if THRESHOLDS.slack * best.roundoff <= THRESHOLDS.clear:
                break
        return best

    @property
    def _resolution(self) -> float:
        """The contender's own error as a round-off, without slack."""
        return self.contender.resolution / THRESHOLDS.slack


def _relate_to_step(start: RunState, step: RunState) -> float:
    """‖θ‖/‖Δθ‖."""
    step_length = _find_length(step)
    if not step_length > 0:
        return 1.0
    return _find_length(start) / step_length


def _find_length(state: RunState) -> float:
    """‖θ‖."""
    return float(sum(t.double().square().sum() for t in state.theta.values())) ** 0.5


def _find_distance(quantity: str, state: RunState, other: RunState) -> float:
    """Return the distance of a quantity in two states, infinite if it is not finite."""
    distance = float((state.values[quantity] - other.values[quantity]).norm())
    return distance if math.isfinite(distance) else math.inf


def _divide(value: float, scale: float) -> float:
    """Return value/scale; for a scale of zero 0 or infinity."""
    if scale > 0:
        return value / scale
    return 0.0 if value == 0 else math.inf
