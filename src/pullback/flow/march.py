"""The march of an integrator along a field: budget, events, and an end with a reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor

from .._core.errors import PullbackError, require
from .field import FieldValue, VectorField
from .trajectory import Event, State, Trajectory

_EXPLICIT = ("DOP853", "RK45")
_STIFF = "the flow may be stiff there (try method='LSODA') or not smooth (kinks, a loss of rank)"


class _Stop(Exception):
    """Raised through an integrator that cannot step back from a point without velocity."""


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
        self._field, self._events, self._at, self._budget = field, list(events), at, budget
        self._evaluations = 0
        self._times: dict[str, list[float]] = defaultdict(list)
        self._pieces: list[Any] = []
        self._kept: list[tuple[float, np.ndarray]] = []
        self._last: tuple[np.ndarray, FieldValue] | None = None
        self._trouble = ""
        self._explicit = True

    def run(self, scheme: Any, first: float, last: float, **settings: Any) -> Trajectory:
        """March from first to last."""
        y = self._field.start.cpu().numpy().astype(np.float64)
        start = self._field.local(self._field.start)  # what the user got wrong is raised here
        self._evaluations += 1
        self._last = (y.copy(), start)
        self._explicit = scheme.__name__ in _EXPLICIT
        if start.reason:
            return self._ended("failed", f"{start.reason} at the start", (first, y), 0)
        self._refuse_stochastic(start)
        self._keep(None, first, y)
        self._margins = [event(self._state(first, y, start)) for event in self._events]
        for event, margin in zip(self._events, self._margins, strict=True):
            if margin >= 0:
                self._times[event.name].append(first)
                if event.stop:
                    return self._ended("event", f"{event.name} at the start", (first, y), 0)
        return self._steps(scheme, first, last, y, settings)

    def _steps(
        self, scheme: Any, first: float, last: float, y: np.ndarray, settings: dict[str, Any]
    ) -> Trajectory:
        now, steps, message = (first, y), 0, None
        try:
            solver = scheme(self._velocity, first, y, last, **settings)
            while solver.status == "running":
                if self._evaluations >= self._budget:
                    reason = f"{self._evaluations} evaluations were used up at t = {now[0]:.6g}"
                    reason += f" (raise max_evaluations or rtol; {_STIFF})"
                    return self._ended("budget", reason, now, steps)
                message = solver.step()
                if solver.status == "failed" or not np.isfinite(solver.y).all():
                    break
                local = self._cached(solver.y)
                if local.reason:
                    self._trouble = local.reason
                    break
                steps, self._trouble = steps + 1, ""
                piece = solver.dense_output()
                hit = self._look(piece, now[0], solver.t, solver.y)
                now = (solver.t, solver.y.copy()) if hit is None else hit[1]
                self._keep(piece, *now)
                if hit is not None:
                    return self._ended("event", f"{hit[0]} at t = {now[0]:.6g}", now, steps)
            else:
                return self._ended("finished", f"t = {last:g} was reached", now, steps)
        except _Stop:
            pass  # the reason is kept
        trouble = self._trouble or f"{message or 'the step failed'} ({_STIFF})"
        return self._ended("failed", f"{trouble}, after t = {now[0]:.6g}", now, steps)

    def _velocity(self, t: float, y: np.ndarray) -> np.ndarray:
        local = self._cached(y)
        if not local.reason:
            return local.velocity.cpu().numpy()
        if np.isfinite(y).all() or not self._trouble:
            self._trouble = local.reason
        if self._explicit:  # a trial beyond the domain: the integrator takes a shorter step
            return np.full_like(y, np.nan)
        raise _Stop

    def _cached(self, y: np.ndarray) -> FieldValue:
        """The field at y; the last one is kept, since an accepted step was just evaluated."""
        if self._last is not None and np.array_equal(self._last[0], y):
            return self._last[1]
        if not np.isfinite(y).all():
            return FieldValue.broken(self._field.start, "the parameters are not finite")
        self._evaluations += 1
        flat = self._tensor(y)
        try:
            local = self._field.local(flat)
        except PullbackError as error:  # it was fine at the start: the flow led out of the domain
            local = FieldValue.broken(flat, f"{error.what}: {error.why}")
        self._last = (y.copy(), local)
        return local

    def _look(
        self, piece: Any, before: float, t: float, y: np.ndarray
    ) -> tuple[str, tuple[float, np.ndarray]] | None:
        """Events within the step, in the order of time; the one that ends it, if any."""
        state = self._state(t, y, self._cached(y))
        now = [event(state) for event in self._events]
        found = []
        for event, was, value in zip(self._events, self._margins, now, strict=True):
            if was < 0 <= value:
                found.append((self._crossing(event, piece, before, t, value), event))
        self._margins = now
        for time, event in sorted(found, key=lambda x: x[0]):
            self._times[event.name].append(time)
            if event.stop:
                return event.name, (time, y.copy() if time == t else np.array(piece(time)))
        return None

    def _crossing(self, event: Event, piece: Any, before: float, t: float, value: float) -> float:
        if value == 0:
            return t

        def margin(time: float) -> float:
            y = np.array(piece(time))
            local = self._cached(y)
            return value if local.reason else event(self._state(time, y, local))

        if margin(before) >= 0:
            return before
        root: Any = scipy.optimize.brentq(margin, before, t, xtol=1e-12 * max(1.0, abs(t)))
        return float(root)

    def _keep(self, piece: Any, t: float, y: np.ndarray) -> None:
        if self._at is None:
            self._kept.append((t, y.copy()))
            if piece is not None:
                self._pieces.append(piece)
            return
        done = len(self._kept)
        for time in self._at[done:].tolist():
            if time > t:
                break
            here = y.copy() if piece is None or time == t else np.array(piece(time))
            self._kept.append((time, here))

    def _state(self, t: float, y: np.ndarray, local: FieldValue) -> State:
        flat = self._tensor(y)
        return State(t, flat, local.loss, local.gradient, local.velocity, self._field)

    def _tensor(self, y: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(y)).to(self._field.start)

    def _refuse_stochastic(self, start: FieldValue) -> None:
        where = self._field.start
        with torch.random.fork_rng([where.device] if where.is_cuda else []):
            torch.manual_seed(torch.initial_seed() + 1)  # dropout would draw another mask
            again = self._field.local(where)
        self._evaluations += 1
        gap = (again.velocity - start.velocity).norm()
        if bool(gap > 1e-8 * start.velocity.norm()) or again.loss != start.loss:
            raise PullbackError(
                "The loss is stochastic",
                f"evaluated twice at the same parameters it gave {start.loss!r} and {again.loss!r}",
                "Fix the batch outside the closure, and turn dropout off (model.eval())",
            )

    def _ended(
        self, status: str, reason: str, end: tuple[float, np.ndarray], steps: int
    ) -> Trajectory:
        like = self._field.start
        points = [self._tensor(y) for _, y in self._kept]
        return Trajectory(
            torch.tensor([t for t, _ in self._kept], dtype=torch.float64),
            torch.stack(points) if points else like.new_zeros(0, len(like)),
            status,
            reason,
            {name: tuple(times) for name, times in self._times.items()},
            self._evaluations,
            steps,
            self._field,
            tuple(self._pieces),
            (end[0], self._tensor(end[1])),
        )
