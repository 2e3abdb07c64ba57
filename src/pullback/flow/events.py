"""What may happen along a flow: functions of the state that turn from negative to positive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError


@dataclass(frozen=True)
class State:
    """The flow at one time: what an event may look at."""

    t: float
    flat: Tensor
    loss: float
    gradient: Tensor
    velocity: Tensor
    _values: Callable[[Tensor], Tensor]
    _like: Callable[[Tensor], Any]

    @property
    def values(self) -> Tensor:
        """The function values."""
        return self._values(self.flat)

    @property
    def parameters(self) -> Any:
        """The parameters, as the user holds them."""
        return self._like(self.flat)


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
        if not callable(function):
            raise PullbackError(
                "The event is not usable", f"got {function!r}", "Pass a function of the state"
            )
        self.function, self.name, self.stop = function, name, stop

    def __call__(self, state: State) -> float:
        """Negative before, zero or more after."""
        found = self.function(state)
        if isinstance(found, Tensor) and found.numel() != 1:
            raise PullbackError(
                f"The event {self.name!r} is not one number",
                f"its shape is {tuple(found.shape)}",
                "Reduce it to one",
            )
        value = float(found)
        if value != value:
            raise PullbackError(
                f"The event {self.name!r} is NaN", f"at t = {state.t:.6g}", "Return a number"
            )
        return value


class Separated(Event):
    """All samples are on the right side: min over samples of the margin becomes positive.

    Args:
        y: signs ±1, shaped like the function values s up to axes of length 1, with the margin
            y·s; or class indices (N,) for logits (N, K), with the margin over the best other class.
        stop: whether the flow ends there; by default the time is only recorded.
    """

    def __init__(self, y: Tensor, stop: bool = False) -> None:
        super().__init__(lambda state: float(self.margins(state.values).min()), "separated", stop)
        self._y = y

    def margins(self, values: Tensor) -> Tensor:
        """One margin per sample."""
        y = self._y.to(values.device)
        if y.numel() == values.numel():
            signs = y.reshape(-1).to(values)
            if not bool((signs.abs() == 1).all()):
                raise PullbackError(
                    "The labels are not signs",
                    f"found {sorted(set(signs.tolist()))[:4]}",
                    "Pass ±1 for single outputs (2y − 1 of labels 0 and 1)",
                )
            return signs * values.reshape(-1)
        classes = values.ndim == 2 and y.shape == values.shape[:1] and not y.is_floating_point()
        if not classes:
            raise PullbackError(
                "The labels do not fit the function values",
                f"got {tuple(y.shape)} of {y.dtype} for {tuple(values.shape)}",
                "Pass one sign per output, or one class index per sample",
            )
        right = values.gather(1, y[:, None].long())
        others = values.scatter(1, y[:, None].long(), -torch.inf)
        return right[:, 0] - others.amax(1)


class Converged(Event):
    """‖∇L‖ or L falls to a threshold; with both given, both must.

    Args:
        gradient: the threshold of ‖∇L‖.
        loss: the threshold of L.
        stop: whether the flow ends there.
    """

    def __init__(
        self, gradient: float | None = None, loss: float | None = None, stop: bool = True
    ) -> None:
        limits = [x for x in (gradient, loss) if x is not None]
        if not limits or not all(x > 0 for x in limits):
            raise PullbackError(
                "The threshold is not usable",
                f"got gradient={gradient}, loss={loss}",
                "Give a positive number to one of them",
            )

        def function(state: State) -> float:
            margins = []
            if gradient is not None:
                margins.append(_log(gradient) - _log(float(state.gradient.norm())))
            if loss is not None:
                margins.append(_log(loss) - _log(state.loss))
            return min(margins)

        super().__init__(function, "converged", stop)


class BlowUp(Event):
    """max|θ| grows to a limit: the flow leaves in finite time, or will not return."""

    def __init__(self, limit: float = 1e12) -> None:
        if not limit > 0:
            raise PullbackError("The limit is not usable", f"got {limit}", "Use a number > 0")
        super().__init__(
            lambda state: _log(float(state.flat.abs().max())) - _log(limit), "blow-up", stop=True
        )


def _log(x: float) -> float:
    return log(max(x, float_info.min))
