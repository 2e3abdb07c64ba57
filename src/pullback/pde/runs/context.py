"""What the phases of a run share, and the questions they ask about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ..._core.processes import Processes
from ..discretization.collocation import Collocation
from ..discretization.trial import Trial
from ..judgement.history import History
from ..judgement.validation import Validation
from ..problem.problem import Problem
from .settings import Settings


@dataclass(frozen=True)
class StagnationThresholds:
    """When a run gets no further."""

    #: steps rejected in a row that end a run; many, since a step in a random subspace may fail
    rejected_steps: int = 30
    #: a power of the machine epsilon: losses below this share of the first one are round-off
    roundoff_exponent: float = 1.3
    #: steps in which a loss that is round-off must fall by `roundoff_fall`, or the run ends; on
    #: Poisson's equation such a loss falls by a fifth in ten steps and the error still improves
    roundoff_steps: int = 10
    roundoff_fall: float = 0.1
    #: share of the first loss below which a solution is near: four digits of the residuals
    near_share: float = 1e-8
    #: steps whose median duration predicts how many fit into the budget: two slow ones of five do
    #: not move it
    timed_steps: int = 5


THRESHOLDS = StagnationThresholds()


@dataclass(frozen=True)
class Losses:
    """The loss at the points of the run, and at fresh ones."""

    training: float
    fresh: float


@dataclass
class RunContext:
    """One run: the discretized problem, its settings, and what happened so far.

    Attributes:
        problem: what is solved.
        trial: the network with the unknown coefficients.
        settings: the options of `solve`.
        collocation: the conditions at the points of the run.
        validation: the conditions at fresh points.
        processes: those that solve together.
        can_adapt: whether points may move and parameters may restart where the run is stuck.
        is_resumable: whether a checkpoint is written, from which another call goes on.
        history: what happened so far.
        share: of the steps and the budget, that the present call may use.
        seconds_before: spent before the present call.
        seconds_elsewhere: of the budget, that other networks took.
        rejected_steps: so many were rejected in a row.
    """

    problem: Problem
    trial: Trial
    settings: Settings
    collocation: Collocation
    validation: Validation
    processes: Processes
    can_adapt: bool
    is_resumable: bool
    history: History = field(default_factory=History)
    share: float = 1.0
    seconds_before: float = 0.0
    seconds_elsewhere: float = 0.0
    rejected_steps: int = 0

    @property
    def is_main_process(self) -> bool:
        """Return True if this process warns and writes for all."""
        return self.processes.rank == 0

    @property
    def seconds_spent(self) -> float:
        """Seconds that the steps of this call took."""
        return self.history.spent - self.seconds_before

    @property
    def steps_left(self) -> float:
        """Return the steps that are left, whatever the budget."""
        limits = self.settings.limits
        seconds = self.history.seconds
        steps = limits.steps - len(self.history)
        is_timed = len(seconds) > THRESHOLDS.timed_steps
        if limits.budget is None or self.is_resumable or not is_timed:
            return steps
        last = seconds[-1 - THRESHOLDS.timed_steps :]
        durations = sorted(end - start for start, end in pairwise(last))
        median = durations[THRESHOLDS.timed_steps // 2]
        seconds_left = limits.budget - self.seconds_elsewhere - self.seconds_spent
        return min(steps, seconds_left / max(median, 1e-9))

    def measure_losses(self) -> Losses:
        """Return the loss of the present network at the points of the run and at fresh ones."""
        return Losses(self.collocation.loss(), self.validation.loss(len(self.history)))

    def exceeds_roundoff(self, loss: float) -> bool:
        """Return True if a loss is more than round-off of the first one."""
        epsilon = torch.finfo(next(self.trial.parameters()).dtype).eps
        return loss > epsilon**THRESHOLDS.roundoff_exponent * self.history.loss[0]

    @property
    def is_level_at_roundoff(self) -> bool:
        """Return True if residuals are round-off and hardly fall any more."""
        loss = self.history.loss
        if not loss or not self.collocation.is_least_squares or self.exceeds_roundoff(loss[-1]):
            return False
        return self.has_level_loss(THRESHOLDS.roundoff_steps, THRESHOLDS.roundoff_fall)

    def is_near_solution(self, loss: float) -> bool:
        """Return True if a loss is a small share of the first one."""
        return loss < THRESHOLDS.near_share * self.history.loss[0]

    @property
    def rejects_all_steps(self) -> bool:
        """Return True if too many steps in a row were rejected."""
        return self.rejected_steps >= THRESHOLDS.rejected_steps

    def has_level_loss(self, steps: int | None, fall: float) -> bool:
        """Return True if the loss fell by less than a share in the last steps.

        None steps are never level, nor are losses that do not compare.
        """
        history = self.history
        if steps is None or not self.collocation.can_compare_losses(len(history) - steps - 1):
            return False
        before = history.loss[-1 - steps]
        return history.loss[-1] > before - fall * abs(before)  # energies may be negative

    def is_stagnant(self, steps: int | None, fall: float) -> bool:
        """Return True if no more is to be expected: steps are rejected, or the loss is level."""
        return self.rejects_all_steps or self.has_level_loss(steps, fall)
