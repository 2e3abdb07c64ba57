"""One solve in progress: steps, stops, checkpoints."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._core.errors import PullbackError
from ..._core.processes import Processes
from ...optim import StepInfo
from .. import checkpoint as saved
from ..discretization.collocation import Collocation
from ..discretization.plan import SamplingPlan
from ..discretization.trial import Trial, select_unknowns
from ..judgement.history import History
from ..judgement.solution import PDESolution
from ..judgement.validation import Validation
from ..judgement.verdict import PDEVerdict, exact_level, overfitted
from ..judgement.yardstick import Yardstick
from ..problem.problem import Problem
from .optimizer import SHORT, costs, make_optimizer, size, take_step
from .progress import ProgressLine, show_progress
from .refusals import precision, refuse_flat, refuse_shape
from .restarts import kick, shuffled
from .settings import Settings
from .signals import Interruption, interruptible

_SAVE_EVERY = 60.0  # seconds between two checkpoints
_REJECTED = 30  # steps rejected in a row that end a run
_SIGNAL = "a process was interrupted"
_DRIFT = 2.0  # of losses at fresh and own points beyond which points move
_EARLY = 1e-8  # of the first loss, above which they do so; below it the end is near
_LATE = 1e-12  # of the first loss, above which they do so where points are overfitted
_SEEN = 500  # points at which neurons are seen to be idle
_FEW = 4  # dimensions up to which all second derivatives of a network are looked at
_LEVEL = 10, 0.05  # steps, and the share of the loss, after which a prior is weighed anew
_SLOW = 0.01, 0.5  # of the loss: runs that fall by less are stuck, far from a solution and near
_TRY = 40  # steps that a kick needs to pay
_PACE = 20  # steps over which the loss is seen to fall
_RESTART = 1e-3  # of their terms: residuals at which a run that is stuck starts anew
_SETTLE = 10  # steps of the end, and of a stuck run, that go down into the valley; a tenth at most


class Run:
    """One solve in progress.

    Attributes:
        problem, network: what is solved, and with what.
        history: what happened so far.
        optimizer: the natural gradient, or another.
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
        like = precision(network)
        self._processes = processes(settings.group)
        self.problem, self.network = problem, network
        self._trial = Trial(network, problem.unknowns, like)
        refuse_shape(problem, network, like)
        self._device = like.device
        self._settings = settings
        sampling = ("points", "sampler", "seed", "resample", "refine")
        chosen = {name: getattr(settings, name) for name in sampling}
        plan = SamplingPlan(problem, size(self._trial), **chosen)
        self._processes.broadcast_first([*self._trial.parameters(), *self._trial.buffers()])
        self._points = Collocation(
            problem, self._trial, plan, like, settings.causal, self._processes
        )
        if problem.domain.dim <= _FEW:
            refuse_flat(problem, network, self._points.sites)
        self.history, self._dtype = History(), like.dtype
        self.optimizer = self._new_optimizer()
        weights, seed = self._points.weights, settings.seed
        self._validation = Validation(
            problem, self._trial, plan.counts, weights, seed, self._processes
        )
        self._adaptive = plan.adaptive
        self._path = None if checkpoint is None else Path(checkpoint)
        self._yardstick = Yardstick(problem, like) if problem.known else None
        self._rejected, self._stuck = 0, False
        self._first = {n: p.detach().clone() for n, p in self._trial.named_parameters()}
        self._best: dict[str, Any] | None = None  # of the runs before the last restart
        self._unsettled: dict[str, Any] | None = None  # before the last steps of all
        #: seconds spent before this call, by a run that it goes on with
        self.begun = 0.0
        self._part, self._started = 1.0, False
        #: relative residuals after a first part of the steps, where there was one
        self.looked: float | None = None
        schedule = settings.resample, settings.refine, settings.causal
        self._identity = {
            "problem": repr(problem),
            "conditions": self._points.fingerprints(),
            "parameters": [(n, list(p.shape)) for n, p in self._trial.named_parameters()],
            "dtype": str(like.dtype),
            "counts": plan.counts,
            "sampler": repr(plan.sampler),
            "schedule": repr([settings.seed, *schedule]),
        }
        self._processes.require_same(
            "what they solve", self._identity, "Call solve alike on all processes"
        )

    @property
    def first(self) -> bool:
        """Whether this process warns and writes for all."""
        return self._processes.rank == 0

    @property
    def error(self) -> float:
        """The last measured error, NaN where no solution is known."""
        return self.history.error[-1] if self.history.error else float("nan")

    @property
    def unknowns(self) -> dict[str, float]:
        """The coefficients now."""
        found = select_unknowns(dict(self._trial.named_parameters()))
        return {n: p.item() for n, p in found.items()}

    def go(self, part: float = 1.0) -> PDESolution:
        """Step until a reason to stop; what was done is kept whatever happens.

        A part of the steps and of the budget may come first, to see how it goes; the next call
        goes on from there.
        """
        again, self._part = self._started, part
        self._started = True
        if self._path is not None:
            self._resume(self._path)
        if not again:
            self.begun = self.history.spent
        due = self.history.spent + _SAVE_EVERY
        self._record_error()
        stopped, orderly = "", self._processes.is_single
        show = self._settings.progress and self._processes.rank == 0
        try:
            with (
                interruptible(self._processes.is_single, self._path is not None) as came,
                show_progress(self.problem.name, self._settings.steps, enabled=show) as line,
            ):
                first = len(self.history)
                if show and (text := costs(self._trial, self._settings, self._points.count)):
                    line.say(text)
                while not (stopped := self._finished()):
                    info = self._step()
                    fresh = self.history.fresh[-1] if self.history.fresh else math.nan
                    line(len(self.history), loss=info.loss, fresh=fresh, error=self.error)
                    if len(self.history) == first + 1 and self.first and not again:
                        self._announce(info, line)
                    if stopped := self._stop_requested(info, came):
                        break
                    if self.history.spent >= due and self._path is not None:
                        with self._processes.raise_together():
                            self._save()
                        due = self.history.spent + _SAVE_EVERY
            orderly = True
        finally:
            self._points.full()
            if orderly:
                self._record_error()
            if self._path is not None and len(self.history):
                with self._processes.raise_together() if orderly else nullcontext():
                    self._save()
        if stopped == _SIGNAL:
            came.end()
        pace = self._pace
        if self._keep_best():  # a try that was stuck, unless the caller ended the run
            pace = 0.0
            self._stuck = self._stuck or stopped.startswith(("all", "the budget"))
        verdict = self._judge(stopped, pace)
        if part < 1 and self.looked is None and not stopped.startswith("the budget"):
            self.looked = verdict.relative
        solution = PDESolution(
            self.problem,
            self.network,
            self.history,
            unknowns=self.unknowns,
            verdict=verdict,
            weights=self._points.weights,
            loss=self._points.loss(),
            spectrum=self._points.spectrum(),
            nested=self._points.nested(),
        )
        came.repeat()
        return solution

    def _announce(self, info: StepInfo, line: ProgressLine) -> None:
        """Say what the run will take, what its memory does not allow, and what makes it slow."""
        left = self._settings.steps - len(self.history)
        seconds, budget = self.history.spent - self.begun, self._settings.budget
        rest = math.inf if budget is None else max(0.0, budget - seconds)
        need = info.rows * info.parameters * torch.finfo(self._dtype).bits // 8
        line.forecast(left, seconds, rest, need)
        if info.gram == "dense" and self._settings.gram == "auto":
            warnings.warn(
                f"The Jacobian takes {need / 2**30:.2g} GiB, more than memory= allows: the Gram "
                "matrix is formed instead, which squares the condition number and costs half of "
                "the digits. Raise memory= or use fewer points",
                stacklevel=5,
            )
        if reason := self._points.nested():
            said = f"Derivatives are nested automatic differentiation, which is slower: {reason}"
            warnings.warn(said, stacklevel=5)

    @torch.no_grad()
    def _set_parameters(self, values: Mapping[str, Tensor]) -> None:
        params = dict(self._trial.named_parameters())
        for name, value in values.items():
            params[name].copy_(value)

    def _stop_requested(self, info: StepInfo, came: Interruption) -> str:
        """Why the run must end after this step: a callback or a signal, on any process."""
        calls = any([call(self, info) is True for call in self._settings.callbacks])
        if not self._processes.is_single:
            own = torch.tensor([int(calls), came.number], device=self._processes.device)
            every = self._processes.gather([own[None]], "decisions")[0].amax(0)
            calls = bool(every[0])
            if every[1]:  # one that came since is shared after the next step
                came.number = int(every[1])
                return _SIGNAL
        return "a callback asked for it" if calls else ""

    def _finished(self) -> str:
        """Why the run ends here, or nothing."""
        history = self.history
        if len(history) >= self._part * self._settings.steps:
            return f"all {self._settings.steps} steps were taken"
        if (tol := self._settings.tol) is not None and (history.error or history):
            small = (history.error or history.loss)[-1] <= tol
            if small and not history.error and self._points.squares:  # at fresh points too?
                small = self._validation.loss(len(history)) <= tol
            if small:
                return f"the tolerance {tol:g} was reached"
        part = self._part if self._path is None else 1.0  # a checkpoint's run goes on when called
        budget = self._settings.budget
        if budget is not None and history.spent - self.begun >= part * budget:
            return f"the budget of {budget:g} s is spent"
        if self._stagnation(*_LEVEL) and self._points.reweigh(len(history)):
            # losses before and after do not compare
            self._validation.weights, self._best, self._rejected = self._points.weights, None, 0
            return ""
        wait, short, most = self._settings.patience, self._short_steps, self._settling_steps
        if short is not None and short < most:
            return ""
        near = bool(history) and history.loss[-1] < _EARLY * history.loss[0]
        stuck = wait is not None and bool(self._stagnation(max(1, wait // 2), _SLOW[near]))
        if short is None and (stuck or self._steps_left <= most) and self._settle():
            return ""
        if wait is not None and (stuck or short == most) and self._try_again():
            return ""
        reason = self._stagnation(wait, 0.01)
        self._stuck = bool(reason)
        return reason

    def _stagnation(self, wait: int | None, fall: float) -> str:
        """Why no more is to be expected from here, or nothing: the loss did not fall by a share."""
        if self._rejected >= _REJECTED:
            return f"{_REJECTED} steps in a row could not lower the loss"
        history = self.history
        if wait is not None and self._points.settled(len(history) - wait - 1):
            before = history.loss[-1 - wait]
            if history.loss[-1] > before - fall * abs(before):  # energies may be negative
                return f"the loss fell by less than 1 % in {wait} steps"
        return ""

    @property
    def _settling_steps(self) -> int:
        """Short steps that a run ends with."""
        return max(1, min(_SETTLE, self._settings.steps // 10))

    @property
    def _steps_left(self) -> float:
        """Steps that are left; a budget that another call goes on from does not count."""
        left, seconds = self._settings.steps - len(self.history), self.history.seconds
        if self._settings.budget is None or self._path is not None or len(seconds) < 6:
            return left
        usual = sorted(b - a for a, b in pairwise(seconds[-6:]))[2]  # not that of one slow step
        return min(left, (self._settings.budget + self.begun - seconds[-1]) / max(usual, 1e-9))

    @property
    def _short_steps(self) -> int | None:
        """Short steps taken so far, None while the run takes long ones."""
        history = self.history
        others = max([*history.moved, *history.restarted], default=-1)
        at = max(history.settled, default=-1)
        return len(history) - at if at > others else None

    def _settle(self) -> bool:
        """Go down into the valley by short steps, whose predictions come true.

        The longest step that lowers the loss at all leads along a valley's walls: what the loss
        then shows is the error of that step, not the distance of the solution. Residuals are those
        in float64, as when a linear system is refined.
        """
        settings, number = self._settings, len(self.history)
        given = settings.step is not None or settings.optimizer is not None
        if given or self._part < 1 or not self._points.settled(number):
            return False
        if self._path is not None and self._steps_left <= self._settling_steps:
            self._unsettled = self._state()
        self.history.settled.append(number)
        self.optimizer, self._rejected = self._new_optimizer(), 0
        return True

    def _try_again(self) -> bool:
        """Go on from stagnation with other points or parameters, where that may help.

        Points move where they are overfitted. Else the parameters are kicked, which leaves a narrow
        valley, as long as that lowers the loss at fresh points; and a run that is far from a
        solution starts anew. The best parameters are kept.
        """
        number, left = len(self.history), self._steps_left
        if not self._adaptive or not self._points.squares:
            return False
        own, fresh = self._points.loss(), self._validation.loss(number)
        if not self._matters(fresh):
            return False
        if self._drifting(own, fresh):
            self._move_points()
            return True
        best = math.inf if self._best is None else self._best["fresh"]
        taken = number - max(self.history.restarted, default=0)
        kicked = left >= max(_TRY, taken / 2) and fresh < 0.5 * best
        if not kicked and (left < taken or self._validation.relative(number) <= _RESTART):
            return False
        if fresh < best:
            params = {n: p.detach().clone() for n, p in self._trial.named_parameters()}
            self._best = {"fresh": fresh, "params": params, "points": self._points.state()}
        generator = torch.Generator().manual_seed(self._settings.seed + 7919 * number)
        if kicked:
            x = self.problem.domain.sample(_SEEN, "sobol", seed=self._settings.seed).x
            kick(self._trial, x.to(next(self._trial.parameters())), generator)
        else:
            self._set_parameters(shuffled(self._first, self._trial, generator))
        self._processes.broadcast_first([*self._trial.parameters()])
        self._points.unsettle(number)
        self.history.restarted.append(number)
        self.optimizer, self._rejected = self._new_optimizer(), 0
        return True

    def _move_points(self) -> None:
        """Gather points where residuals are large, and go on from there by long steps."""
        number, short = len(self.history), self._short_steps
        self._points.concentrate(number)
        self.history.moved.append(number)
        self._rejected = 0
        if short is not None:
            self.optimizer = self._new_optimizer()

    def _drifting(self, own: float, fresh: float) -> bool:
        """Whether the run overfits its points; a smaller gap counts while the loss is large."""
        first = self.history.loss[0]
        early = fresh > _DRIFT * own and fresh > _EARLY * first
        return early or (overfitted(own, fresh) and fresh > _LATE * first)

    def _matters(self, loss: float) -> bool:
        """Whether a loss is more than round-off."""
        noise = torch.finfo(next(self._trial.parameters()).dtype).eps ** 1.3
        return loss > noise * self.history.loss[0]

    def _new_optimizer(self) -> Optimizer:
        """The optimizer of the steps to come."""
        settings, count = self._settings, self._points.count
        settings = settings if self._short_steps is None else replace(settings, step=SHORT)
        return make_optimizer(self._trial, settings, self._dtype, self._processes, count)

    def _keep_best(self) -> bool:
        """Go back to the best of several tries; whether that was not the last."""
        if self._best is None or self._validation.loss(len(self.history)) <= self._best["fresh"]:
            return False
        self._set_parameters(self._best["params"])
        self._points.restore(self._best["points"])
        self.history.forget(len(self.history))
        self._record_error()
        return True

    def _judge(self, reason: str, pace: float) -> PDEVerdict:
        """The verdict on the present network."""
        number = len(self.history)
        if not self._points.squares:
            return PDEVerdict(reason, self._stuck, math.nan, math.nan, math.nan)
        if tries := len(self.history.restarted):
            reason += f" (the best of {tries + 1} tries)"
        own, fresh = self._points.loss(), self._validation.loss(number)
        relative = self._validation.relative(number)
        if number:
            self.history.validate(own, fresh)
            if not self._matters(fresh):  # where the solution is zero its terms are round-off too
                relative = min(relative, (fresh / self.history.loss[0]) ** 0.5)
        limit = exact_level(torch.finfo(self._dtype).eps)
        return PDEVerdict(reason, self._stuck, own, fresh, relative, falling=pace, exact=limit)

    @property
    def _pace(self) -> float:
        """The share by which the loss fell in each of the last long steps, 0 if not comparable."""
        losses = self.history.loss[: len(self.history) - (self._short_steps or 0)]
        if len(losses) <= _PACE or not self._points.settled(len(losses) - _PACE - 1):
            return 0.0
        return 1 - max(0.0, losses[-1] / losses[-1 - _PACE]) ** (1 / _PACE)

    def _validate(self, number: int) -> None:
        """Look at fresh points, and move the run's own where they are overfitted."""
        done = not number or number in self.history.validated[-1:]
        if done or number % self._settings.measure or not self._points.squares:
            return
        own, fresh = self._points.loss(), self._validation.loss(number)
        self.history.validate(own, fresh)
        if self._adaptive and self._drifting(own, fresh):
            self._move_points()

    def _step(self) -> StepInfo:
        start = time.perf_counter()
        number = len(self.history)
        self._validate(number)
        objective = self._points.at(number, double=self._short_steps is not None)
        info = take_step(self.optimizer, objective, self._trial, self._processes)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elapsed = self._slowest(time.perf_counter() - start)
        if not info.accepted and "not finite" in info.reason:
            self._points.refuse_broken(info.reason)
        self._rejected = 0 if info.accepted else self._rejected + 1
        history = self.history
        history.seconds.append(history.spent + elapsed)
        history.loss.append(info.loss)
        history.damping.append(info.damping)
        history.trials.append(info.trials)
        history.accepted.append(info.accepted)
        if len(history) % self._settings.measure == 0:
            self._record_error()
        return info

    def _slowest(self, seconds: float) -> float:
        """The longest time that a process took: all stop by the same clock."""
        if self._processes.is_single:
            return seconds
        own = torch.tensor([seconds], dtype=torch.float64, device=self._processes.device)
        return float(self._processes.gather([own], "decisions")[0].max())

    def _record_error(self) -> None:
        """Measure the error on the first process, for all of them."""
        if self._yardstick is None:
            return
        error = math.nan
        with torch.no_grad(), self._processes.raise_together():
            if self._processes.rank == 0:
                like = next(self.network.parameters())
                error = self._yardstick.error(lambda x: self.network(x.to(like.dtype)))
        self.history.measure(self._processes.broadcast_object(error))

    def _save(self) -> None:
        assert self._path is not None
        if self._processes.rank == 0:
            state = {"run": self._identity, "looked": self.looked, "first": self._first}
            saved.save(self._path, {**state, **self._state(), "unsettled": self._unsettled})

    def _state(self) -> dict[str, Any]:
        """Copies of all that the next step depends on."""
        return {
            "trial": {n: v.clone() for n, v in self._trial.state_dict().items()},
            "optimizer": self.optimizer.state_dict(),
            "history": self.history.as_dict(),
            "rejected": self._rejected,
            "best": self._best,
            "points": self._points.state(),
        }

    def _resume(self, path: Path) -> None:
        state = None
        with self._processes.raise_together():
            if self._processes.rank == 0 and path.exists():
                state = saved.load(path, self._identity)
        state = self._processes.broadcast_object(state)
        if state is None:
            return
        before, steps = state["unsettled"], self._settings.steps
        if before is not None and steps > len(before["history"]["loss"]) + self._settling_steps:
            state |= before  # the end that it settled for was not the end
        else:
            self._unsettled = before
        self._trial.to(next(iter(state["trial"].values())).dtype)
        saved.restore(path, self._trial, state["trial"])
        self.history = History.from_dict(state["history"])
        self.optimizer = self._new_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
        self._rejected = state["rejected"]
        if self.looked is None:  # else this process has looked since it was saved
            self.looked = state.get("looked")
        self._first, self._best = state["first"], state["best"]
        self._points.restore(state["points"])
        self._validation.weights = self._points.weights


def processes(group: Any) -> Processes:
    """Those of the group, or all that `torch.distributed` knows."""
    known = dist.is_available() and dist.is_initialized()
    if group is None and not known and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PullbackError(
            "The processes do not know each other",
            f"torchrun started {os.environ['WORLD_SIZE']}, and each would solve the whole problem",
            "Call torch.distributed.init_process_group() first",
        )
    return Processes(dist.group.WORLD if group is None and known else group)
