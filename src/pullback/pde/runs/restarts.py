"""Stuck runs go on from other parameters, and the best ones are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .context import Losses, RunContext
from .perturbation import kick, shuffle_parameters


@dataclass(frozen=True)
class RestartThresholds:
    """When parameters are kicked or start anew."""

    #: steps that must be left for a kick: a kicked run needs about as many to get better
    steps_after_kick: int = 40
    #: fresh loss over the best one before, above which another kick is not worth its steps: losses
    #: nearer than a factor of two may differ by their points alone
    useful_ratio: float = 0.5
    #: relative residuals above which a stuck run starts anew: it is far from any solution, by
    #: ten times what counts as solved
    hopeless_residual: float = 1e-3
    #: points at which the activity of neurons is measured: a root mean square to 3 %
    activity_points: int = 500
    #: between the seeds of two restarts: a prime other than that of `Strategy`'s candidates
    seed_stride: int = 7919


THRESHOLDS = RestartThresholds()


@dataclass(frozen=True)
class BestTry:
    """The best parameters of earlier tries.

    Attributes:
        fresh_loss: their loss at fresh points.
        parameters: by name.
        points: the state of the run's points.
    """

    fresh_loss: float
    parameters: Mapping[str, Tensor]
    points: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, to save."""
        return vars(self).copy()


class Restarts:
    """Kicks the parameters out of a narrow valley, or starts anew far from a solution.

    Attributes:
        initial: the parameters that the run began with.
        best: the best ones before the last restart, None before the first.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.initial = self._copy_parameters()
        self.best: BestTry | None = None

    @property
    def _best_loss(self) -> float:
        if self.best is None:
            return math.inf
        return self.best.fresh_loss

    @property
    def _steps_since_restart(self) -> int:
        history = self._context.history
        return len(history) - max(history.restarted, default=0)

    def should_kick(self, losses: Losses) -> bool:
        """Return True if enough steps are left, and the last kick paid."""
        steps_needed = max(THRESHOLDS.steps_after_kick, self._steps_since_restart / 2)
        has_improved = losses.fresh < THRESHOLDS.useful_ratio * self._best_loss
        return self._context.steps_left >= steps_needed and has_improved

    def should_start_anew(self) -> bool:
        """Return True if as many steps are left as were taken, and no solution is near."""
        if self._context.steps_left < self._steps_since_restart:
            return False
        residual = self._context.validation.relative(len(self._context.history))
        return not residual <= THRESHOLDS.hopeless_residual

    def begin(self, losses: Losses) -> bool:
        """Change the parameters if that may help; return True if they changed."""
        context = self._context
        is_kick = self.should_kick(losses)
        if not is_kick and not self.should_start_anew():
            return False
        if losses.fresh < self._best_loss:
            self.best = BestTry(losses.fresh, self._copy_parameters(), context.collocation.state())
        number = len(context.history)
        seed = context.settings.sampling.seed
        generator = torch.Generator().manual_seed(seed + THRESHOLDS.seed_stride * number)
        if is_kick:
            points = context.problem.domain.sample(THRESHOLDS.activity_points, "sobol", seed=seed)
            kick(context.trial, points.x.to(next(context.trial.parameters())), generator)
        else:
            self._set_parameters(shuffle_parameters(self.initial, context.trial, generator))
        context.processes.broadcast_first([*context.trial.parameters()])
        context.collocation.compare_losses_from(number)
        context.history.restarted.append(number)
        return True

    def return_to_best(self) -> bool:
        """Restore the best of several tries; return True if that was not the last one."""
        context = self._context
        if self.best is None:
            return False
        if context.validation.loss(len(context.history)) <= self.best.fresh_loss:
            return False
        self._set_parameters(self.best.parameters)
        context.collocation.restore(self.best.points)
        return True

    def _copy_parameters(self) -> dict[str, Tensor]:
        trial = self._context.trial
        return {name: p.detach().clone() for name, p in trial.named_parameters()}

    @torch.no_grad()
    def _set_parameters(self, values: Mapping[str, Tensor]) -> None:
        parameters = dict(self._context.trial.named_parameters())
        for name, value in values.items():
            parameters[name].copy_(value)
