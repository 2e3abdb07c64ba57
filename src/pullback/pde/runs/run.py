"""One network that is trained on a problem, from its points to a verdict and a checkpoint."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._core.errors import PullbackError
from ..._core.processes import Processes
from ...optim import StepInfo
from ..checkpoint import load_parameters
from ..discretization.collocation import Collocation
from ..discretization.homogeneity import (
    has_ground_state_without_nodes,
    has_many_states,
    is_solved_by_zero,
)
from ..discretization.plan import SamplingPlan
from ..discretization.trial import Trial, select_unknowns
from ..judgement.history import History
from ..judgement.solution import PDESolution
from ..judgement.stop import Stop, StopReason
from ..judgement.validation import Validation
from ..judgement.verdict import PDEVerdict, find_exact_level
from ..judgement.yardstick import Yardstick
from ..problem.problem import Problem
from .context import RunContext
from .course import Course
from .descent import Descent
from .optimizer import count_parameters, describe_cost
from .progress import ProgressLine, show_progress
from .refusals import find_template, refuse_flat, refuse_shape
from .restarts import BestTry
from .run_file import RunFile
from .settings import Settings
from .signals import Interruption, interruptible
from .stop_rules import StopRules


@dataclass(frozen=True)
class RunThresholds:
    """What a run looks at before and after its steps."""

    #: dimensions up to which all second derivatives of a network are computed, to refuse flat ones:
    #: ten of them at four
    curvature_dimensions: int = 4
    #: steps over which the pace of the loss is measured: twice those for which a run settles,
    #: so that these do not decide alone
    pace_steps: int = 20
    #: points at which the sign of an eigenvalue problem's field is looked at: ten of them
    #: are in a part that is 1 % of the domain
    node_points: int = 1000
    #: values of the other sign, as a share of the largest, that are a node and not an error
    node_share: float = 0.01


THRESHOLDS = RunThresholds()
#: reasons for which a call ends, but not the run: it goes on if it is given more
_LIMIT_REASONS = frozenset({StopReason.ALL_STEPS, StopReason.BUDGET_SPENT})


class Run:
    """One solve in progress.

    Between two steps its `Course` may change the phase: long steps, short steps, moved points,
    other parameters. `StopRules` say when it ends.

    Attributes:
        problem, network: what is solved, and with what.
        early_residual: relative residuals after a first share of the steps, if there was one.
    """

    def __init__(
        self,
        problem: Problem,
        network: nn.Module,
        settings: Settings,
        checkpoint: str | Path | None = None,
    ) -> None:
        if settings.device is not None:
            network.to(settings.device)
        self.problem = problem
        self.network = network
        self.early_residual: float | None = None
        self._settings = settings
        parameter = find_template(network)
        self._dtype = parameter.dtype
        refuse_shape(problem, network, parameter)
        path = None if checkpoint is None else Path(checkpoint)
        trial = Trial(network, problem.unknowns, parameter)
        plan = settings.sampling.plan(problem, count_parameters(trial))
        self._context = self._build_context(trial, plan, parameter, is_resumable=path is not None)
        self._collocation = self._context.collocation
        self._processes = self._context.processes
        self._descent = Descent(self._context)
        self._course = Course(self._context, self._descent, self._collect_state)
        self._stop_rules = StopRules(self._context)
        self._yardstick = Yardstick(problem, parameter) if problem.known else None
        self._is_stuck = False
        self._has_started = False
        identity = self._identify(plan)
        remedy = "Call solve alike on all processes"
        self._processes.require_same("what they solve", identity, remedy)
        self._file = RunFile(path, identity, self._processes)

    def _build_context(
        self, trial: Trial, plan: SamplingPlan, template: Tensor, *, is_resumable: bool
    ) -> RunContext:
        """Draw the points and build the residuals there; all processes begin alike."""
        settings = self._settings
        processes = find_solve_processes(settings.group)
        processes.broadcast_first([*trial.parameters(), *trial.buffers()])
        collocation = Collocation(
            self.problem,
            trial,
            plan,
            template,
            settings.causal,
            processes,
            settings.method.map_memory,
        )
        if self.problem.domain.dim <= THRESHOLDS.curvature_dimensions:
            refuse_flat(self.problem, self.network, collocation.sites)
        validation = Validation(
            self.problem, trial, plan.counts, collocation.weights, settings.sampling.seed, processes
        )
        return RunContext(
            problem=self.problem,
            trial=trial,
            settings=settings,
            collocation=collocation,
            validation=validation,
            processes=processes,
            can_adapt=plan.adaptive,
            is_resumable=is_resumable,
        )

    def _identify(self, plan: SamplingPlan) -> dict[str, Any]:
        """Return what must be the same on all processes, and for a run to go on from a file."""
        sampling = self._settings.sampling
        parameters = self._context.trial.named_parameters()
        schedule = [sampling.seed, sampling.resample, sampling.refine, self._settings.causal]
        return {
            "problem": repr(self.problem),
            "conditions": self._collocation.fingerprints(),
            "parameters": [(name, list(p.shape)) for name, p in parameters],
            "dtype": str(self._dtype),
            "counts": plan.counts,
            "sampler": repr(plan.sampler),
            "schedule": repr(schedule),
        }

    @property
    def history(self) -> History:
        """What happened so far."""
        return self._context.history

    @property
    def optimizer(self) -> Optimizer:
        """The natural gradient, or another."""
        return self._descent.optimizer

    @property
    def is_main_process(self) -> bool:
        """Return True if this process warns and writes for all."""
        return self._context.is_main_process

    @property
    def seconds_spent(self) -> float:
        """Seconds that the steps of this call took."""
        return self._context.seconds_spent

    @property
    def steps_left(self) -> int:
        """Steps that may still be taken, whatever the budget allows."""
        return max(0, self._settings.limits.steps - len(self.history))

    @property
    def error(self) -> float:
        """The last measured error, NaN where no solution is known."""
        return self.history.error[-1] if self.history.error else math.nan

    @property
    def unknowns(self) -> dict[str, float]:
        """The coefficients now."""
        unknowns = select_unknowns(dict(self._context.trial.named_parameters()))
        return {name: value.item() for name, value in unknowns.items()}

    def advance(self, share: float = 1.0, *, seconds_elsewhere: float = 0.0) -> PDESolution:
        """Step until there is a reason to stop; steps that were taken are kept in any case.

        Args:
            share: of the steps and of the budget. A first call with less than 1 shows how the run
                gets on; the next call goes on from there.
            seconds_elsewhere: of the budget, that other networks took.
        """
        context = self._context
        context.seconds_elsewhere = seconds_elsewhere
        is_first_call = not self._has_started
        self._has_started = True
        context.share = share
        self._resume()
        if is_first_call:
            context.seconds_before = self.history.spent
        self._record_error()
        stop, interruption = self._take_steps(announce=is_first_call)
        if stop.reason is StopReason.SIGNAL:
            interruption.end()
        is_paused = share < 1 and stop.reason in _LIMIT_REASONS
        verdict = self._judge(stop, is_paused=is_paused)
        is_early_look = share < 1 and stop.reason is not StopReason.BUDGET_SPENT
        if is_early_look and self.early_residual is None:
            self.early_residual = verdict.relative
        solution = PDESolution(
            self.problem,
            self.network,
            self.history,
            unknowns=self.unknowns,
            verdict=verdict,
            weights=self._collocation.weights,
            loss=self._collocation.loss(),
            spectrum=self._collocation.spectrum(),
            nested=self._collocation.nesting_reason(),
        )
        interruption.repeat()
        return solution

    def _take_steps(self, *, announce: bool) -> tuple[Stop, Interruption]:
        """Step until there is a reason to stop, and save what was done even after an exception."""
        settings = self._settings
        is_shown = settings.progress and self.is_main_process
        is_orderly = self._processes.is_single  # several processes can only act together
        title = self.problem.name
        try:
            with (
                interruptible(
                    is_single=self._processes.is_single, is_saved=self._file.path is not None
                ) as interruption,
                show_progress(title, settings.limits.steps, enabled=is_shown) as line,
            ):
                if is_shown:
                    self._print_cost(line)
                stop = self._step_until_stop(line, interruption, announce=announce)
                stop = self._undo_divergence(stop)
            is_orderly = True
        finally:
            self._collocation.restore_precision()
            if is_orderly:
                self._record_error()
            if len(self.history):
                self._file.save(self._collect_checkpoint_state, collectively=is_orderly)
        return stop, interruption

    def _step_until_stop(
        self, line: ProgressLine, interruption: Interruption, *, announce: bool
    ) -> Stop:
        """Return why the run ends, after all its steps."""
        history = self.history
        should_announce = announce and self.is_main_process
        self._file.start_clock(history.spent)
        while True:
            stop = self._find_stop()
            if stop is not None:
                return stop
            info = self._step()
            fresh_loss = history.fresh_loss[-1] if history.fresh_loss else math.nan
            line(len(history), loss=info.loss, fresh=fresh_loss, error=self.error)
            if should_announce:
                self._announce_cost(info, line)
                should_announce = False
            if not math.isfinite(info.loss):  # the natural gradient raises
                return Stop(StopReason.DIVERGED, len(history))
            stop = self._find_request(info, interruption)
            if stop is not None:
                return stop
            if self._file.is_due(history.spent):
                self._file.save(self._collect_checkpoint_state)
                self._file.start_clock(history.spent)

    def _undo_divergence(self, stop: Stop) -> Stop:
        """Return to the lowest loss where an optimizer of the caller has diverged, and say so."""
        if stop.reason is StopReason.SIGNAL:
            return stop
        is_known = stop.reason is StopReason.DIVERGED
        if not is_known and not self._descent.has_diverged(self._course.restarts.initial):
            return stop
        self._descent.return_to_lowest()
        self.history.forget(len(self.history))
        self._is_stuck = True
        return Stop(StopReason.DIVERGED, len(self.history))

    def _find_stop(self) -> Stop | None:
        """Return why the run ends here; None if it goes on, for which the phase may change."""
        stop = self._stop_rules.check_limits()
        if stop is not None:
            return stop
        if self._course.change():
            return None
        stop = self._stop_rules.check_stagnation()
        self._is_stuck = stop is not None
        return stop

    def _find_request(self, info: StepInfo, interruption: Interruption) -> Stop | None:
        """Return why a callback or a signal ends the run, on whichever process; None without."""
        answers = [callback(self, info) for callback in self._settings.callbacks]
        has_request = any(answer is True for answer in answers)
        if not self._processes.is_single:
            device = self._processes.device
            request = torch.tensor([int(has_request), interruption.number], device=device)
            requests = self._processes.gather([request[None]], "decisions")[0].amax(0)
            has_request = bool(requests[0])
            if requests[1]:  # a signal that came since is shared after the next step
                interruption.number = int(requests[1])
                return Stop(StopReason.SIGNAL)
        if has_request:
            return Stop(StopReason.CALLBACK)
        return None

    def _step(self) -> StepInfo:
        """Take one step, and measure the error now and then."""
        info = self._descent.step()
        if len(self.history) % self._settings.measure == 0:
            self._record_error()
        return info

    def _print_cost(self, line: ProgressLine) -> None:
        """Print what a step will take, if there are many parameters."""
        residual_count = self._collocation.residual_count
        cost = describe_cost(self._context.trial, self._settings.method, residual_count)
        if cost:
            line.say(cost)

    def _announce_cost(self, info: StepInfo, line: ProgressLine) -> None:
        """Print what the run will take; warn of what makes it slow or too large for memory."""
        limits = self._settings.limits
        seconds = self.seconds_spent
        seconds_left = math.inf
        if limits.budget is not None:
            seconds_left = max(0.0, limits.budget - seconds)
        jacobian_bytes = info.rows * info.parameters * torch.finfo(self._dtype).bits // 8
        line.forecast(limits.steps - len(self.history), seconds, seconds_left, jacobian_bytes)
        if info.gram == "dense" and self._settings.method.gram == "auto":
            warnings.warn(
                f"The Jacobian takes {jacobian_bytes / 2**30:.2g} GiB, more than memory= allows: "
                "the Gram matrix is formed instead, which squares the condition number and costs "
                "half of the digits. Raise memory= or use fewer points",
                stacklevel=6,
            )
        reason = self._collocation.nesting_reason()
        if reason:
            warnings.warn(
                f"Derivatives are nested automatic differentiation, which is slower: {reason}",
                stacklevel=6,
            )

    def _judge(self, stop: Stop, *, is_paused: bool) -> PDEVerdict:
        """Return the verdict on the best parameters, which the network then has.

        A run that pauses keeps its present ones: it may be in the middle of another try.
        """
        pace = 0.0
        if stop.reason is not StopReason.DIVERGED:
            pace = self._measure_pace()
        if not is_paused and self._course.restarts.return_to_best():
            self.history.forget(len(self.history))
            self._record_error()
            pace = 0.0  # that of a try which was not the best
            if stop.reason in _LIMIT_REASONS:
                self._is_stuck = True
        if not self._collocation.is_least_squares:
            return PDEVerdict(stop, self._is_stuck, math.nan, math.nan, math.nan)
        number = len(self.history)
        losses = self._context.measure_losses()
        relative = self._context.validation.relative(number)
        if number:
            self.history.validate(losses.training, losses.fresh)
            is_roundoff = not self._context.exceeds_roundoff(losses.fresh)
            if is_roundoff and is_solved_by_zero(self.problem):
                # where the solution is zero its terms are round-off too
                smallest = torch.finfo(torch.float64).tiny  # the first loss may be zero
                share = losses.fresh / max(self.history.loss[0], smallest)
                relative = min(relative, share**0.5)
        return PDEVerdict(
            stop=replace(stop, tries=len(self.history.restarted) + 1),
            stuck=self._is_stuck,
            training_loss=losses.training,
            fresh_loss=losses.fresh,
            relative=relative,
            falling=pace,
            exact=find_exact_level(torch.finfo(self._dtype).eps),
            noise=self._context.validation.misfit(number),
            has_many_states=has_many_states(self.problem),
            is_excited=has_ground_state_without_nodes(self.problem) and self._has_nodes(),
        )

    @torch.no_grad()
    def _has_nodes(self) -> bool:
        """Return True if the first field has values of both signs."""
        parameter = next(self.network.parameters())
        points = self.problem.domain.sample(THRESHOLDS.node_points, "sobol").x.to(parameter)
        values = self.network(points)[:, 0]
        low = float(values.min())
        high = float(values.max())
        return min(high, -low) > THRESHOLDS.node_share * max(high, -low)

    def _measure_pace(self) -> float:
        """Return the share by which the loss fell in each of the last long steps.

        It is 0 where these losses do not compare.
        """
        steps = THRESHOLDS.pace_steps
        long_steps = len(self.history) - (self.history.short_steps or 0)
        losses = self.history.loss[:long_steps]
        first = len(losses) - steps - 1
        if first < 0 or not self._collocation.can_compare_losses(first) or losses[first] == 0:
            return 0.0
        return 1 - max(0.0, losses[-1] / losses[first]) ** (1 / steps)

    def _record_error(self) -> None:
        """Measure the error on the first process, for all of them."""
        if self._yardstick is None:
            return
        error = math.nan
        with torch.no_grad(), self._processes.raise_together():
            if self.is_main_process:
                dtype = next(self.network.parameters()).dtype
                error = self._yardstick.error(lambda x: self.network(x.to(dtype)))
        self.history.measure(self._processes.broadcast_object(error))

    def _collect_checkpoint_state(self) -> dict[str, Any]:
        """Return everything that a run needs to continue from the file."""
        return {
            "early_residual": self.early_residual,
            "initial": self._course.restarts.initial,
            "before_settling": self._course.state_before_settling,
            **self._collect_state(),
        }

    def _collect_state(self) -> dict[str, Any]:
        """Return copies of all that the next step depends on."""
        best = self._course.restarts.best
        trial = self._context.trial.state_dict()
        return {
            "trial": {name: value.clone() for name, value in trial.items()},
            "optimizer": self.optimizer.state_dict(),
            "history": self.history.as_dict(),
            "rejected_steps": self._context.rejected_steps,
            "best": None if best is None else best.as_dict(),
            "points": self._collocation.state(),
        }

    def _resume(self) -> None:
        """Continue from the file, if there is one."""
        state = self._file.load()
        if state is None:
            return
        if self._can_undo_settling(state["before_settling"]):
            state |= state["before_settling"]
        else:
            self._course.state_before_settling = state["before_settling"]
        if self.early_residual is None:  # else it was measured after the file was written
            self.early_residual = state["early_residual"]
        self._course.restarts.initial = state["initial"]
        self._restore(state)

    def _can_undo_settling(self, state_before: dict[str, Any] | None) -> bool:
        """Return True if more steps are allowed now than when a saved run settled for its end.

        The state from before it settled is then the one to continue from.
        """
        if state_before is None:
            return False
        end = len(state_before["history"]["loss"]) + self._course.settling.step_count
        return self._settings.limits.steps > end

    def _restore(self, state: dict[str, Any]) -> None:
        """Set the run to a state that `_collect_state` returned."""
        assert self._file.path is not None
        context = self._context
        context.trial.to(next(iter(state["trial"].values())).dtype)
        load_parameters(self._file.path, context.trial, state["trial"])
        context.history = History.from_dict(state["history"])
        self._descent.renew_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
        context.rejected_steps = state["rejected_steps"]
        best = state["best"]
        self._course.restarts.best = None if best is None else BestTry(**best)
        self._collocation.restore(state["points"])
        context.validation.weights = self._collocation.weights


def find_solve_processes(group: Any) -> Processes:
    """Return the processes of the group, or all that `torch.distributed` knows."""
    is_initialized = dist.is_available() and dist.is_initialized()
    if group is None and is_initialized:
        return Processes(dist.group.WORLD)
    if group is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PullbackError(
            "The processes do not know each other",
            f"torchrun started {os.environ['WORLD_SIZE']}, and each would solve the whole problem",
            "Call torch.distributed.init_process_group() first",
        )
    return Processes(group)
