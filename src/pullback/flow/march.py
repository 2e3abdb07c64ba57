"""The march of an integrator along a field: budget, events, and an end with a reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from .._core.errors import PullbackError, require
from .field import FieldValue, VectorField
from .trajectory import Event, FlowStatus, State, Trajectory

_EXPLICIT_METHODS = ("DOP853", "RK45")
_STIFFNESS_HINT = (
    "the flow may be stiff there (try method='LSODA') or not smooth (kinks, a loss of rank)"
)


@dataclass(frozen=True)
class MarchThresholds:
    """Numbers of the search for events and of the test for random losses.

    Attributes:
        event_tolerance: of the time of an event, relative to it.
        repeatability: of the velocity at the same parameters, relative. Sums in another order
            differ by 1e-15, dropout by 1.
    """

    event_tolerance: float = 1e-12
    repeatability: float = 1e-8


THRESHOLDS = MarchThresholds()


class _NoVelocityError(Exception):
    """Raised through an integrator that cannot step back from a point without velocity."""


@dataclass(frozen=True)
class _Point:
    """Parameters at a time."""

    t: float
    y: np.ndarray


@dataclass(frozen=True)
class _Stop:
    """An event that ends the flow."""

    name: str
    point: _Point


class March:
    """One integration.

    Args:
        field: what is integrated.
        events: what is looked for; the first that stops ends it.
        at: the times to keep, or None to keep the interpolants of all steps.
        budget: evaluations before it gives up.
    """

    def __init__(
        self, field: VectorField, events: Sequence[Event], *, at: Tensor | None, budget: int
    ) -> None:
        for event in events:
            require(isinstance(event, Event), "An event", event, "Pass flow.Event(function)")
        self._field = field
        self._events = list(events)
        self._at = at
        self._budget = budget
        self._evaluations = 0
        self._times: dict[str, list[float]] = defaultdict(list)
        self._pieces: list[Any] = []
        self._points: list[_Point] = []
        self._last_evaluation: tuple[np.ndarray, FieldValue] | None = None
        #: why the field had no velocity at the last trial
        self._trouble = ""
        self._is_explicit = True
        self._margins: list[float] = []

    def run(self, scheme: Any, first: float, last: float, **settings: Any) -> Trajectory:
        """Integrate from first to last."""
        y = self._field.start.cpu().numpy().astype(np.float64)
        start = self._field.local(self._field.start)  # what the user got wrong is raised here
        self._evaluations += 1
        point = _Point(first, y)
        self._last_evaluation = (y.copy(), start)
        self._is_explicit = scheme.__name__ in _EXPLICIT_METHODS
        if start.reason:
            return self._finish(FlowStatus.FAILED, f"{start.reason} at the start", point, 0)
        self._refuse_stochastic(start)
        self._keep(None, point)
        state = self._make_state(point, start)
        self._margins = [event(state) for event in self._events]
        for event, margin in zip(self._events, self._margins, strict=True):
            if margin >= 0:
                self._times[event.name].append(first)
                if event.stop:
                    return self._finish(FlowStatus.EVENT, f"{event.name} at the start", point, 0)
        return self._take_steps(scheme, point, last, settings)

    def _take_steps(
        self, scheme: Any, point: _Point, last: float, settings: dict[str, Any]
    ) -> Trajectory:
        """Step from a point to the last time, or to whatever ends the flow before."""
        steps = 0
        message = None
        try:
            solver = scheme(self._velocity, point.t, point.y, last, **settings)
            while solver.status == "running":
                if self._evaluations >= self._budget:
                    return self._finish(
                        FlowStatus.BUDGET, self._describe_budget(point.t), point, steps
                    )
                message = solver.step()
                if not self._accept(solver):
                    break
                steps += 1
                piece = solver.dense_output()
                stop = self._find_stop(piece, point.t, _Point(solver.t, solver.y))
                if stop is not None:
                    self._keep(piece, stop.point)
                    reason = f"{stop.name} at t = {stop.point.t:.6g}"
                    return self._finish(FlowStatus.EVENT, reason, stop.point, steps)
                point = _Point(solver.t, solver.y.copy())
                self._keep(piece, point)
            else:
                reason = f"t = {last:g} was reached"
                return self._finish(FlowStatus.FINISHED, reason, point, steps)
        except _NoVelocityError:
            pass  # the reason is in self._trouble
        trouble = self._trouble or f"{message or 'the step failed'} ({_STIFFNESS_HINT})"
        reason = f"{trouble}, after t = {point.t:.6g}"
        return self._finish(FlowStatus.FAILED, reason, point, steps)

    def _accept(self, solver: Any) -> bool:
        """Return True if the integrator's step succeeded, and the field has a velocity there."""
        if solver.status == "failed" or not np.isfinite(solver.y).all():
            return False
        self._trouble = self._evaluate(solver.y).reason
        return not self._trouble

    def _describe_budget(self, t: float) -> str:
        return (
            f"{self._evaluations} evaluations were used up at t = {t:.6g} "
            f"(raise max_evaluations or rtol; {_STIFFNESS_HINT})"
        )

    def _velocity(self, t: float, y: np.ndarray) -> np.ndarray:
        """Return the velocity for the integrator; NaN where there is none."""
        local = self._evaluate(y)
        if not local.reason:
            return local.velocity.cpu().numpy()
        if np.isfinite(y).all() or not self._trouble:
            self._trouble = local.reason
        if self._is_explicit:  # a trial beyond the domain: the integrator takes a shorter step
            return np.full_like(y, np.nan)
        raise _NoVelocityError

    def _evaluate(self, y: np.ndarray) -> FieldValue:
        """Return the field at y; the last value is kept, since an accepted step was evaluated."""
        if self._last_evaluation is not None and np.array_equal(self._last_evaluation[0], y):
            return self._last_evaluation[1]
        if not np.isfinite(y).all():
            reason = "the parameters are not finite"
            return FieldValue.without_velocity(self._field.start, reason)
        self._evaluations += 1
        flat = self._to_tensor(y)
        try:
            local = self._field.local(flat)
        except PullbackError as error:  # it was fine at the start: the flow led out of the domain
            local = FieldValue.without_velocity(flat, f"{error.what}: {error.why}")
        self._last_evaluation = (y.copy(), local)
        return local

    def _find_stop(self, piece: Any, before: float, end: _Point) -> _Stop | None:
        """Record the events within a step, in the order of time; return the one that ends the flow.

        Args:
            piece: the interpolant of the step.
            before: the time at its beginning.
            end: the point at its end.
        """
        state = self._make_state(end, self._evaluate(end.y))
        margins = [event(state) for event in self._events]
        crossings: list[tuple[float, Event]] = []
        for event, earlier, margin in zip(self._events, self._margins, margins, strict=True):
            if earlier < 0 <= margin:
                crossings.append((self._find_crossing(event, piece, before, end.t, margin), event))
        self._margins = margins
        for time, event in sorted(crossings, key=lambda crossing: crossing[0]):
            self._times[event.name].append(time)
            if event.stop:
                return _Stop(event.name, self._interpolate(piece, time, end))
        return None

    def _find_crossing(
        self, event: Event, piece: Any, before: float, t: float, end_margin: float
    ) -> float:
        """Return the time within a step at which an event's function becomes zero."""
        if end_margin == 0:
            return t

        def margin(time: float) -> float:
            point = _Point(time, np.array(piece(time)))
            local = self._evaluate(point.y)
            if local.reason:
                return end_margin
            return event(self._make_state(point, local))

        if margin(before) >= 0:
            return before
        tolerance = THRESHOLDS.event_tolerance * max(1.0, abs(t))
        root: Any = scipy.optimize.brentq(margin, before, t, xtol=tolerance)
        return float(root)

    def _interpolate(self, piece: Any, time: float, end: _Point) -> _Point:
        """Return the point at a time within a step, which ends at `end`."""
        if piece is None or time == end.t:
            return _Point(time, end.y.copy())
        return _Point(time, np.array(piece(time)))

    def _keep(self, piece: Any, end: _Point) -> None:
        """Store the end of a step with its interpolant, or the times that were asked for."""
        if self._at is None:
            self._points.append(_Point(end.t, end.y.copy()))
            if piece is not None:
                self._pieces.append(piece)
            return
        remaining_times = self._at[len(self._points) :].tolist()
        for time in remaining_times:
            if time > end.t:
                break
            self._points.append(self._interpolate(piece, time, end))

    def _make_state(self, point: _Point, local: FieldValue) -> State:
        flat = self._to_tensor(point.y)
        return State(point.t, flat, local.loss, local.gradient, local.velocity, self._field)

    def _to_tensor(self, y: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(y)).to(self._field.start)

    def _refuse_stochastic(self, start: FieldValue) -> None:
        """Raise if the field has another value in a second evaluation at the start."""
        flat = self._field.start
        with torch.random.fork_rng([flat.device] if flat.is_cuda else []):
            torch.manual_seed(torch.initial_seed() + 1)  # dropout would draw another mask
            second = self._field.local(flat)
        self._evaluations += 1
        gap = (second.velocity - start.velocity).norm()
        is_far = bool(gap > THRESHOLDS.repeatability * start.velocity.norm())
        if is_far or second.loss != start.loss:
            raise PullbackError(
                "The loss is stochastic",
                f"evaluated twice at the same parameters it gave {start.loss!r} and "
                f"{second.loss!r}",
                "Fix the batch outside the closure, and turn dropout off (model.eval())",
            )

    def _finish(self, status: FlowStatus, reason: str, end: _Point, steps: int) -> Trajectory:
        """Return what was reached, and why it ended there."""
        start = self._field.start
        points = start.new_zeros(len(self._points), len(start))
        for row, point in zip(points, self._points, strict=True):
            row.copy_(self._to_tensor(point.y))
        return Trajectory(
            t=torch.tensor([point.t for point in self._points], dtype=torch.float64),
            points=points,
            status=status,
            reason=reason,
            events={name: tuple(times) for name, times in self._times.items()},
            evaluations=self._evaluations,
            steps=steps,
            _field=self._field,
            _pieces=tuple(self._pieces),
            _end=(end.t, self._to_tensor(end.y)),
        )
