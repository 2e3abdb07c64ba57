"""One optimizer on a model and on its twins, and how far their updates are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from ..._core.errors import PullbackError
from ..charts.transformations import Twin
from .run import AuditData, Make, RunState, find_tangent, perturb_start, run, trainable_parameters
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
    """Return contenders of a function, a contender, a dict of functions or a list of contenders."""
    if isinstance(optimizers, Mapping):
        contenders = [_as_contender(make, str(name)) for name, make in optimizers.items()]
    elif isinstance(optimizers, Sequence):
        contenders = [_as_contender(make, _find_name(make)) for make in optimizers]
    else:
        contenders = [_as_contender(optimizers, _find_name(optimizers))]
    has_duplicates = len({c.name for c in contenders}) < len(contenders)
    if not contenders or has_duplicates or not all(callable(c.make) for c in contenders):
        raise PullbackError(
            "There is no optimizer to audit",
            f"got {optimizers!r}, where two may not have the same name",
            "Give a function model ↦ optimizer, a dict of such functions, or Contenders",
        )
    return contenders


def _as_contender(make: Any, name: str) -> Contender:
    if isinstance(make, Contender):
        return make
    return Contender(name, make)


def _find_name(make: Any) -> str:
    """Return the function's name; "optimizer" for a lambda, which has none."""
    name = getattr(make, "__name__", type(make).__name__)
    if name == "<lambda>":
        return "optimizer"
    return name


@dataclass(frozen=True)
class Runs:
    """The runs of an optimizer from one start.

    Attributes:
        short: the states before and after one step, for each size.
        long: the states of the run of full size.
        find_tangent: index of a size ↦ that step as a tangent vector.
    """

    short: list[list[RunState]]
    long: list[RunState]
    find_tangent: Callable[[int], RunState]


@dataclass(frozen=True)
class NoisyRuns:
    """Runs from a start, and from one that is off by round-off; their distance is the noise."""

    exact: Runs
    perturbed: Runs


@dataclass(frozen=True)
class _Ends:
    """Where four runs arrived: original and twin, each also from a start that is off by round-off.

    Instead of states these may be tangent vectors.
    """

    original: RunState
    original_perturbed: RunState
    twin: RunState
    twin_perturbed: RunState

    def measure_mismatch(self, quantity: str) -> float:
        """Return the distance of twin and original."""
        return _measure_distance(quantity, self.twin, self.original)

    def measure_noise(self, quantity: str) -> float:
        """Return the larger distance that round-off of the start makes; 0 if none is finite."""
        distances = (
            _measure_distance(quantity, self.original_perturbed, self.original),
            _measure_distance(quantity, self.twin_perturbed, self.twin),
        )
        return max([0.0, *filter(math.isfinite, distances)])


class OptimizerTrial:
    """An optimizer on the original model, to be compared with its runs on twins.

    Args:
        model: the original.
        contender: the optimizer.
        setting: batch, loss and seed.
        sizes: multiples of the optimizer's lr for one small step, largest first.
        steps: how many steps the long run takes.
        eps: ε of the parameters' dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        contender: Contender,
        setting: AuditData,
        sizes: tuple[float, ...],
        steps: int,
        eps: float,
    ) -> None:
        self.contender = contender
        self.setting = setting
        self.sizes = sizes
        self.steps = steps
        self.eps = eps
        original = Twin(model, trainable_parameters)  # f is the identity
        self._original_runs = self._run(original)
        for before, after in self._original_runs.exact.short:
            if not _measure_distance("batch", after, before) > 0:
                raise PullbackError(
                    f"{contender.name} does not move the model",
                    "after a step the outputs are what they were",
                    "Build the optimizer on the model that make_optimizer is given, with lr > 0",
                )

    def compare(self, name: str, twin: Twin) -> AuditRow:
        """Return the mismatch of the twin's runs with the original's, for every quantity."""
        twin_runs = self._run(twin, may_diverge=True)
        quantities = self._original_runs.exact.long[0].values
        measures = {quantity: self._measure(quantity, twin_runs) for quantity in quantities}
        return AuditRow(self.contender.name, name, measures)

    def _run(self, start: Twin, *, may_diverge: bool = False) -> NoisyRuns:
        """Run from the start, and from one that is off by round-off."""
        perturbed_start, perturbed_setting = perturb_start(start, self.setting, self.eps)
        return NoisyRuns(
            self._run_once(start, self.setting, may_diverge),
            self._run_once(perturbed_start, perturbed_setting, may_diverge),
        )

    def _run_once(self, start: Twin, setting: AuditData, may_diverge: bool) -> Runs:
        """Return single steps of all sizes from a start, and one run of many steps."""

        def run_steps(size: float, steps: int) -> list[RunState]:
            make = self.contender.make
            return run(make, start, setting, size=size, steps=steps, may_diverge=may_diverge)

        short = [run_steps(size, 1) for size in self.sizes]
        long = run_steps(1.0, self.steps)

        @cache
        def find_tangent_of_size(index: int) -> RunState:
            before, after = short[index]
            return find_tangent(start, setting, before, after)

        return Runs(short, long, find_tangent_of_size)

    def _measure(self, quantity: str, twin_runs: NoisyRuns) -> Measure:
        """Return the mismatch of one quantity, for all sizes and along the long run."""
        start = self._original_runs.exact.long[0]
        steps = []
        for index in range(len(self.sizes)):
            before = self._original_runs.exact.short[index][0]
            ends = self._collect(twin_runs, lambda runs, index=index: runs.short[index][1])
            steps.append(self._measure_step(quantity, before, ends))
        long_run = []
        for number in range(1, self.steps + 1):
            ends = self._collect(twin_runs, lambda runs, number=number: runs.long[number])
            long_run.append(self._measure_step(quantity, start, ends))
        direction = self._measure_direction(quantity, twin_runs)
        return Measure(self.sizes, tuple(steps), direction, tuple(long_run))

    def _collect(self, twin_runs: NoisyRuns, select: Callable[[Runs], RunState]) -> _Ends:
        """Return what `select` takes from the four runs."""
        return _Ends(
            select(self._original_runs.exact),
            select(self._original_runs.perturbed),
            select(twin_runs.exact),
            select(twin_runs.perturbed),
        )

    def _measure_step(self, quantity: str, start: RunState, ends: _Ends) -> UpdateMismatch:
        """Return m(η), with at least the round-off that the values at the start have."""
        moved = _measure_distance(quantity, ends.original, start)
        noise = max(self.eps * float(start.values[quantity].norm()), ends.measure_noise(quantity))
        roundoff = max(_divide(noise, moved), self._resolution)
        return UpdateMismatch(_divide(ends.measure_mismatch(quantity), moved), roundoff)

    def _measure_direction(self, quantity: str, twin_runs: NoisyRuns) -> UpdateMismatch:
        """Return m(0), from the smallest step that stands out of round-off."""
        best = UpdateMismatch(math.inf, math.inf)
        for index in reversed(range(len(self.sizes))):
            tangents = self._collect(twin_runs, lambda runs, index=index: runs.find_tangent(index))
            length = float(tangents.original.values[quantity].norm())
            # a step is known as the difference of two points, which round-off sets
            cancellation = max(
                1.0,
                _measure_cancellation(self._original_runs.exact, index),
                _measure_cancellation(twin_runs.exact, index),
            )
            noise = _divide(tangents.measure_noise(quantity), length)
            roundoff = max(noise, self.eps * cancellation, self._resolution)
            if roundoff <= best.roundoff:
                mismatch = _divide(tangents.measure_mismatch(quantity), length)
                best = UpdateMismatch(mismatch, roundoff)
            if THRESHOLDS.slack * best.roundoff <= THRESHOLDS.clear:
                break
        return best

    @property
    def _resolution(self) -> float:
        """Return the round-off at which the optimizer's own resolution is no mismatch."""
        return self.contender.resolution / THRESHOLDS.slack


def _measure_cancellation(runs: Runs, index: int) -> float:
    """Return ‖θ‖/‖Δθ‖ of the step of this size; 1 if nothing moved."""
    start_length = runs.short[index][0].measure_theta()
    step_length = runs.find_tangent(index).measure_theta()
    if not step_length > 0:
        return 1.0
    return start_length / step_length


def _measure_distance(quantity: str, state: RunState, other: RunState) -> float:
    """Return the distance of two states in a quantity; infinite if one of them is not finite."""
    distance = float((state.values[quantity] - other.values[quantity]).norm())
    if not math.isfinite(distance):
        return math.inf
    return distance


def _divide(value: float, scale: float) -> float:
    """Return value/scale, where 0/0 = 0 and a positive value over 0 is infinite."""
    if scale > 0:
        return value / scale
    return 0.0 if value == 0 else math.inf
