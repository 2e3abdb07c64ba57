"""Causal weights: later times count once earlier ones are solved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..domains import SpaceTime
from ..problem.problem import Problem

_BINS = 16
_FIRST = 320.0  # ε in the beginning: the last time has the weight e^{−ε} then
_EVERY = 3  # steps between two updates, each of which takes a forward pass
_LEAST = 1e-8  # the smallest weight
_SOLVED, _SHARPER = 0.9, 3.0  # the last weight above which ε grows, and by which factor
_OPEN = 0.5  # the last weight below which losses of different steps do not compare


class Causal:
    """w(t) = exp(−ε L(t)/L₀) for the squared residuals of equations at time t.

    L(t) is the equations' loss before t, and L₀ all of it at first. An evolution is solved from its
    beginning then, as it happens. Within a step the weights are constants. Where all are close to
    1, ε triples, so that causality counts at every size of residuals.
    Wang, Sankaran and Perdikaris, Comput. Methods Appl. Mech. Eng. 421 (2024) 116813.

    Attributes:
        weights: w in bins of time, (16,).
        open: whether the end does not count fully yet.
    """

    def __init__(self, problem: Problem) -> None:
        if not isinstance(problem.domain, SpaceTime):
            raise PullbackError(
                "Causal weights need time",
                f"the domain is {problem.domain!r}",
                "Use SpaceTime(space, (t0, t1)), or leave causal= out",
            )
        self._start, self._end = problem.domain.time
        self._sharpness, self._first, self._last = _FIRST, 0.0, -1
        self.weights = torch.ones(_BINS, dtype=torch.float64)

    @property
    def open(self) -> bool:
        return float(self.weights[-1]) < _OPEN

    def __call__(self, x: Tensor) -> Tensor:
        """w at points (N, d)."""
        return self.weights.to(x)[self._bins(x)]

    def losses(self, x: Tensor, squares: Tensor) -> Tensor:
        """Squared residuals (N,) at points (N, d), summed by time: (16,)."""
        found = torch.zeros(_BINS, dtype=torch.float64, device=x.device)
        return found.index_add(0, self._bins(x), squares.double())

    def due(self, step: int) -> bool:
        """Whether weights change before this step; an interrupted one finds them as they were."""
        return step % _EVERY == 0 and step != self._last

    def update(self, losses: Tensor, step: int) -> None:
        """The weights for what is left at each time before this step."""
        losses, self._last = losses.cpu(), step
        self._first = self._first or float(losses.sum())
        earlier = (losses.cumsum(0) - losses) / self._first
        self.weights = torch.exp(-self._sharpness * earlier).clamp(min=_LEAST)
        if self.weights[-1] > _SOLVED:
            self._sharpness *= _SHARPER

    def _bins(self, x: Tensor) -> Tensor:
        share = (x[:, -1] - self._start) / (self._end - self._start)
        return (_BINS * share).long().clamp(0, _BINS - 1)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {k: getattr(self, k) for k in ("weights", "_sharpness", "_first", "_last")}

    def restore(self, state: dict[str, Any]) -> None:
        """The weights of a `state`."""
        vars(self).update(state)
