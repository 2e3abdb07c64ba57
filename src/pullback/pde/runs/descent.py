"""The steps of a run, and the points and optimizer they are taken with."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...optim import StepInfo
from .context import RunContext
from .optimizer import make_optimizer, take_step
from .point_moves import PointMoves


@dataclass(frozen=True)
class DescentThresholds:
    """When an optimizer of the caller has diverged."""

    #: final loss over that of the initial network: the first steps of Adam may raise a loss several
    #: times
    divergent_growth: float = 100.0


THRESHOLDS = DescentThresholds()


@dataclass(frozen=True)
class LowestLoss:
    """The lowest loss that was seen, and the parameters that had it."""

    loss: float
    parameters: Mapping[str, Tensor]


class Descent:
    """Takes the steps of a run; they are short ones in float64 after it has settled.

    Attributes:
        optimizer: of the steps to come.
        point_moves: moves points that the run overfits.
        lowest: what an optimizer of the caller has reached, which may diverge; None before its
            first step, and for the natural gradient, which rejects steps that raise the loss.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._dtype = next(context.trial.parameters()).dtype
        self.point_moves = PointMoves(context)
        self.lowest: LowestLoss | None = None
        self.optimizer: Optimizer
        self.renew_optimizer()

    @property
    def is_short(self) -> bool:
        """Return True if the run takes short steps now."""
        return self._context.history.short_steps is not None

    def renew_optimizer(self) -> None:
        """Begin with an optimizer that knows nothing of the steps before."""
        context = self._context
        context.rejected_steps = 0
        self.optimizer = make_optimizer(
            context.trial,
            context.settings.method,
            dtype=self._dtype,
            processes=context.processes,
            residual_count=context.collocation.residual_count,
            is_short=self.is_short,
        )

    def step(self) -> StepInfo:
        """Take one step and note it in the history."""
        start = time.perf_counter()
        context = self._context
        number = len(context.history)
        self._validate(number)
        objective = context.collocation.objective_at(number, double=self.is_short)
        parameters_before: dict[str, Tensor] | None = None
        if context.settings.method.optimizer is not None:
            parameters_before = self._copy_parameters()
        info = take_step(self.optimizer, objective, context.trial, context.processes)
        device = next(context.trial.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = self._longest(time.perf_counter() - start)
        if not info.accepted and "not finite" in info.reason and self.lowest is None:
            context.collocation.raise_not_finite(info.reason)
        if parameters_before is not None:
            self._keep_lowest(LowestLoss(info.loss, parameters_before))
        self._record(info, seconds)
        return info

    def _keep_lowest(self, candidate: LowestLoss) -> None:
        """Keep the parameters with the lowest loss."""
        if self.lowest is None or candidate.loss < self.lowest.loss:
            self.lowest = candidate

    def has_diverged(self, initial: Mapping[str, Tensor]) -> bool:
        """Return True if steps of the caller's optimizer led far above the initial loss.

        Both losses are those at the present points, with the present weights.
        """
        if self.lowest is None:
            return False
        collocation = self._context.collocation
        loss = collocation.loss()
        if not math.isfinite(loss):
            return True
        return loss > THRESHOLDS.divergent_growth * abs(collocation.loss(initial))

    @torch.no_grad()
    def return_to_lowest(self) -> None:
        """Give the network the parameters of the lowest loss, and begin with a new optimizer."""
        assert self.lowest is not None
        parameters = dict(self._context.trial.named_parameters())
        for name, value in self.lowest.parameters.items():
            parameters[name].copy_(value)
        self.renew_optimizer()

    def _copy_parameters(self) -> dict[str, Tensor]:
        trial = self._context.trial
        return {name: p.detach().clone() for name, p in trial.named_parameters()}

    def move_points(self) -> None:
        """Gather points where residuals are large, and go on from there by long steps."""
        was_short = self.is_short
        self.point_moves.move()
        self._context.rejected_steps = 0
        if was_short:
            self.renew_optimizer()

    def _validate(self, number: int) -> None:
        """Measure the loss at fresh points now and then; move the points if they are overfitted."""
        context = self._context
        history = context.history
        is_due = number > 0 and number % context.settings.measure == 0
        is_done = history.validated[-1:] == [number]
        if not is_due or is_done or not context.collocation.is_least_squares:
            return
        losses = context.measure_losses()
        history.validate(losses.training, losses.fresh)
        if context.can_adapt and self.point_moves.are_needed(losses):
            self.move_points()

    def _record(self, info: StepInfo, seconds: float) -> None:
        """Write a step to the history, and count rejected ones in a row."""
        context = self._context
        history = context.history
        if info.accepted:
            context.rejected_steps = 0
        else:
            context.rejected_steps += 1
        history.seconds.append(history.spent + seconds)
        history.loss.append(info.loss)
        history.damping.append(info.damping)
        history.trials.append(info.trials)
        history.accepted.append(info.accepted)

    def _longest(self, seconds: float) -> float:
        """Return the longest time that a process took, so that all stop by the same clock."""
        processes = self._context.processes
        if processes.is_single:
            return seconds
        duration = torch.tensor([seconds], dtype=torch.float64, device=processes.device)
        return float(processes.gather([duration], "decisions")[0].max())
