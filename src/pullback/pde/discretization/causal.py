"""Causal weights: later times count once earlier ones are solved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..domains import SpaceTime
from ..problem.problem import Problem


@dataclass(frozen=True)
class CausalThresholds:
    """How causal weights change; the values were measured on the Allen–Cahn equation alone."""

    #: bins of time: as many weights, each an average over a sixteenth of the points
    bins: int = 16
    #: ε in the beginning: the last time then has the weight e^{−ε}
    first_sharpness: float = 320.0
    #: ε grows by this factor once the last weight is above `solved_weight`
    sharpness_growth: float = 3.0
    solved_weight: float = 0.9
    #: steps between two updates, each of which takes a forward pass: little beside the step
    steps_between: int = 3
    #: the smallest weight, so that no time is forgotten; its root, 1e-4, scales a row of A
    smallest_weight: float = 1e-8
    #: the last weight below which losses of different steps do not compare: half of a loss may be
    #: hidden then
    open_weight: float = 0.5


THRESHOLDS = CausalThresholds()


class Causal:
    """w(t) = exp(−ε L(t)/L₀) for the squared residuals of equations at time t.

    L(t) is the equations' loss before t, and L₀ all of it at first. An evolution is solved from its
    beginning then, as it happens. Within a step the weights are constants. Where all are close to
    1, ε triples, so that causality counts at every size of residuals.
    Wang, Sankaran and Perdikaris, Comput. Methods Appl. Mech. Eng. 421 (2024) 116813.

    Attributes:
        weights: w in bins of time, (16,).
    """

    def __init__(self, problem: Problem) -> None:
        if not isinstance(problem.domain, SpaceTime):
            raise PullbackError(
                "Causal weights need time",
                f"the domain is {problem.domain!r}",
                "Use SpaceTime(space, (t0, t1)), or leave causal= out",
            )
        self._start, self._end = problem.domain.time
        self._sharpness = THRESHOLDS.first_sharpness
        self._first_loss = 0.0
        self._last_update = -1
        self.weights = torch.ones(THRESHOLDS.bins, dtype=torch.float64)

    @property
    def is_open(self) -> bool:
        """Return True if the end does not count fully yet."""
        return float(self.weights[-1]) < THRESHOLDS.open_weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return w at points (N, d)."""
        return self.weights.to(x)[self._find_bins(x)]

    def sum_by_time(self, x: Tensor, squares: Tensor) -> Tensor:
        """Return squared residuals (N,) at points (N, d), summed by time: (16,)."""
        sums = torch.zeros(THRESHOLDS.bins, dtype=torch.float64, device=x.device)
        return sums.index_add(0, self._find_bins(x), squares.double())

    def is_due(self, step: int) -> bool:
        """Return True if weights change before this step; they do so once, even if it repeats."""
        return step % THRESHOLDS.steps_between == 0 and step != self._last_update

    def update(self, losses: Tensor, step: int) -> None:
        """Choose the weights before a step from the losses (16,) by time."""
        losses = losses.cpu()
        self._last_update = step
        self._first_loss = self._first_loss or float(losses.sum())
        earlier = (losses.cumsum(0) - losses) / self._first_loss
        self.weights = torch.exp(-self._sharpness * earlier).clamp(min=THRESHOLDS.smallest_weight)
        if self.weights[-1] > THRESHOLDS.solved_weight:
            self._sharpness *= THRESHOLDS.sharpness_growth

    def _find_bins(self, x: Tensor) -> Tensor:
        share = (x[:, -1] - self._start) / (self._end - self._start)
        return (THRESHOLDS.bins * share).long().clamp(0, THRESHOLDS.bins - 1)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "weights": self.weights,
            "sharpness": self._sharpness,
            "first_loss": self._first_loss,
            "last_update": self._last_update,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`."""
        self.weights = state["weights"]
        self._sharpness = state["sharpness"]
        self._first_loss = state["first_loss"]
        self._last_update = state["last_update"]
