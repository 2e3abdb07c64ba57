"""The result of a flow: times, states, and the events that ended it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isnan, log
from sys import float_info
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._core.capture import unwrap_model
from .._core.errors import PullbackError, require
from .field import VectorField


@dataclass(frozen=True)
class State:
    """The flow at one time: what an event may look at."""

    t: float
    flat: Tensor
    loss: float
    gradient: Tensor
    velocity: Tensor
    _field: VectorField

    @property
    def values(self) -> Tensor:
        """The function values."""
        return self._field.values(self.flat)

    @property
    def parameters(self) -> Any:
        """The parameters, as the user holds them."""
        return self._field.unflatten(self.flat)


class Event:
    """Happens where `function(state)` turns from negative to zero or more.

    Args:
        function: a continuous function of `State`, a float.
        name: what it is called in `Trajectory.events`.
        stop: whether the flow ends there.
    """

    def __init__(
        self, function: Callable[[State], float], name: str = "event", stop: bool = True
    ) -> None:
        require(callable(function), "The event", function, "Pass a function of the state")
        self.function = function
        self.name = name
        self.stop = stop

    def __call__(self, state: State) -> float:
        """Return a number that is negative before the event, and zero or more after it."""
        value = self.function(state)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise PullbackError(
                f"The event {self.name!r} is not one number",
                f"its shape is {tuple(value.shape)}",
                "Reduce it to one",
            )
        value = float(value)
        if isnan(value):
            raise PullbackError(
                f"The event {self.name!r} is NaN", f"at t = {state.t:.6g}", "Return a number"
            )
        return value


def blow_up(limit: float = 1e12) -> Event:
    """Return the event that ends a flow whose max|θ| grows to a limit."""

    def margin(state: State) -> float:
        return log(max(float(state.flat.abs().max()), float_info.min)) - log(limit)

    return Event(margin, "blow-up")


class FlowStatus(StrEnum):
    """How a flow ended."""

    FINISHED = "finished"
    EVENT = "event"
    FAILED = "failed"
    BUDGET = "budget"


@dataclass(frozen=True)
class Trajectory:
    """θ(t) from t[0] to t[-1].

    Attributes:
        t: the accepted times of the integrator, or the `at=` times that were reached.
        points: θ at these times, flat, (len(t), p).
        status: "finished", "event", "failed" or "budget".
        reason: why it ended, as a sentence.
        events: the times at which each named event happened.
        evaluations: of the velocity.
        steps: accepted by the integrator.
    """

    t: Tensor
    points: Tensor
    status: FlowStatus
    reason: str
    events: Mapping[str, tuple[float, ...]]
    evaluations: int
    steps: int
    _field: VectorField
    _pieces: Sequence[Any]
    _end: tuple[float, Tensor]

    @property
    def ok(self) -> bool:
        """Return True if the flow ran to the end of its time, or to an event that was asked for."""
        return self.status in (FlowStatus.FINISHED, FlowStatus.EVENT)

    @property
    def start(self) -> float:
        """The first time that was kept."""
        return float(self.t[0]) if len(self.t) else self.end

    @property
    def end(self) -> float:
        """The last time that was reached."""
        return self._end[0]

    def flat(self, t: float | Tensor | None = None) -> Tensor:
        """θ(t), (p,) for one time and (k, p) for k; at the end by default."""
        if t is None:
            return self._end[1].clone()
        times = torch.as_tensor(t, dtype=torch.float64)
        if times.ndim:
            return torch.stack([self.flat(float(x)) for x in times])
        t = float(times)
        if t == self.end:
            return self._end[1].clone()
        hits = (self.t == t).nonzero()
        if len(hits):
            return self.points[int(hits[0])].clone()
        if not self._pieces:
            raise PullbackError(
                f"θ({t:.6g}) was not kept",
                "with at= only those times are",
                "Ask for one of trajectory.t, or integrate without at=",
            )
        if not self.start <= t <= self.end:
            raise PullbackError(
                f"t = {t:.6g} is outside the trajectory",
                f"it covers {self.start:.6g} to {self.end:.6g}; it ended because {self.reason}",
                "Ask within, or integrate further",
            )
        ends = [piece.t for piece in self._pieces]
        piece = self._pieces[min(int(np.searchsorted(ends, t)), len(ends) - 1)]
        return torch.from_numpy(np.array(piece(t))).to(self.points)

    def parameters(self, t: float | None = None) -> Any:
        """θ(t) by name (or in the form of start=); at the end by default."""
        return self._field.unflatten(self.flat(t))

    def loss(self, t: float | Tensor | None = None) -> Tensor:
        """L(θ(t)), one number per time."""
        flat = self.flat(t)
        losses = [self._field.loss(x) for x in flat.reshape(-1, flat.shape[-1])]
        return flat.new_tensor(losses).reshape(flat.shape[:-1])

    def values(self, t: float | Tensor | None = None, *inputs: Any) -> Tensor:
        """The function values at θ(t): those of the loss, or the model's at other inputs."""
        flat = self.flat(t)
        if flat.ndim > 1:
            return torch.stack([self._values(x, inputs) for x in flat])
        return self._values(flat, inputs)

    def _values(self, flat: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        if not inputs:
            return self._field.values(flat)
        model = self._field.model
        if model is None:
            raise PullbackError(
                "There is no model to evaluate", "the flow is of a function", "Call φ yourself"
            )
        with torch.no_grad():
            return functional_call(model, self._field.space.split(flat), inputs)

    def load_(self, model: nn.Module, t: float | None = None) -> None:
        """Write θ(t) into a module's parameters; the end point by default."""
        params = dict(unwrap_model(model).named_parameters())
        with torch.no_grad():
            for name, value in self._field.space.split(self.flat(t)).items():
                if name not in params or params[name].shape != value.shape:
                    raise PullbackError(
                        f"The module has no parameter {name!r} of shape {tuple(value.shape)}",
                        "it is not the one whose flow this is",
                        "Pass the same model, or a copy of it",
                    )
                params[name].copy_(value)

    def __repr__(self) -> str:
        return (
            f"Trajectory(t={self.start:.6g} to {self.end:.6g}, "
            f"{self.status}: {self.reason}, steps={self.steps}, evaluations={self.evaluations})"
        )
