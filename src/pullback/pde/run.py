"""One solve in progress: steps, stops, checkpoints."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .._core.errors import PullbackError
from .._core.processes import Processes
from ..optim import StepInfo
from . import checkpoint as saved
from .checks import precision, refuse_flat, refuse_shape
from .collocation import Collocation
from .discretize import Trial, coefficients
from .history import History
from .method import costs, optimizer, peak_memory, size, stepped
from .plan import Plan
from .problem import Problem
from .progress import Line, shown
from .settings import Settings
from .signals import Interruption, held_back, terminable
from .solution import Solution
from .validation import Validation, Yardstick
from .verdict import Verdict, overfitted

_SAVE_EVERY = 60.0  # seconds between two checkpoints
_REJECTED = 30  # steps rejected in a row that end a run
_SIGNAL = "a process was interrupted"
_DRIFT = 2.0  # of losses at fresh and own points beyond which points move
_EARLY = 1e-8  # of the first loss, above which they do so; below it the end is near
_LATE = 1e-12  # of the first loss, above which they do so where points are overfitted
_KICK = 0.01  # of the parameters' size
_FEW = 4  # dimensions up to which all second derivatives of a network are looked at
_LEVEL = 10, 0.05  # steps, and the share of the loss, after which a prior is weighed anew
_TRY = 40  # steps that a kick needs to pay
_PACE = 20  # steps over which the loss is seen to fall
_RESTART = 1e-3  # of their terms: residuals at which a run that is stuck starts anew


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
        plan = Plan(
            problem,
            size(self._trial),
            points=settings.points,
            sampler=settings.sampler,
            seed=settings.seed,
            resample=settings.resample,
            refine=settings.refine,
        )
        self._processes.adopt([*self._trial.parameters(), *self._trial.buffers()])
        self._points = Collocation(
            problem, self._trial, plan, like, settings.single, settings.causal, self._processes
        )
        if problem.domain.dim <= _FEW:
            refuse_flat(problem, network, self._points.sites)
        self.optimizer = self._made(like.dtype)
        self._validation = Validation(
            problem,
            self._trial,
            plan.counts,
            self._points.weights,
            settings.seed,
            self._processes,
        )
        self._adaptive = plan.adaptive
        self._path = None if checkpoint is None else Path(checkpoint)
        self.history = History()
        self._yardstick = Yardstick(problem, like) if problem.known else None
        self._rejected, self._stuck = 0, False
        self._first = {n: p.detach().clone() for n, p in self._trial.named_parameters()}
        self._best: dict[str, Any] | None = None  # of the runs before the last restart
        self._said = False
        #: seconds spent before this call, by a run that it goes on with
        self.begun = 0.0
        self._part, self._started = 1.0, False
        #: relative residuals after a first part of the steps, where there was one
        self.looked: float | None = None
        schedule = settings.resample, settings.refine, settings.single, settings.causal
        self._identity = {
            "problem": repr(problem),
            "conditions": self._points.fingerprints(),
            "parameters": [(n, list(p.shape)) for n, p in self._trial.named_parameters()],
            "dtype": str(like.dtype),
            "counts": plan.counts,
            "sampler": repr(plan.sampler),
            "schedule": repr([settings.seed, *schedule]),
        }
        self._processes.same("what they solve", self._identity, "Call solve alike on all processes")

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
        found = coefficients(dict(self._trial.named_parameters()))
        return {n: p.item() for n, p in found.items()}

    def go(self, part: float = 1.0) -> Solution:
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
        stopped, orderly = "", self._processes.alone
        show = self._settings.progress and self._processes.rank == 0
        try:
            with (
                self._interruptible() as came,
                shown(self.problem.name, self._settings.steps, enabled=show) as line,
            ):
                first = len(self.history)
                if show and (text := costs(self._trial, self._settings, self._points.count)):
                    line.say(text)
                while not (stopped := self._finished()):
                    info = self._step()
                    line(len(self.history), loss=info.loss, fresh=self._fresh, error=self.error)
                    if len(self.history) == first + 1 and self.first and not again:
                        self._announce(info, line)
                    if stopped := self._asked(info, came):
                        break
                    if self.history.spent >= due and self._path is not None:
                        with self._processes.together():
                            self._save()
                        due = self.history.spent + _SAVE_EVERY
            orderly = True
        finally:
            self._points.full(len(self.history))
            if not len(self.history):  # refused, perhaps after rounding to single precision
                self._put(self._first)
            if orderly:
                self._record_error()
            if self._path is not None and len(self.history):
                with self._processes.together() if orderly else nullcontext():
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
        solution = Solution(
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

    def _interruptible(self) -> AbstractContextManager[Interruption]:
        """One process ends at SIGTERM with a checkpoint, several of them after the same step."""
        return terminable(self._path is not None) if self._processes.alone else held_back()

    def _announce(self, info: StepInfo, line: Line) -> None:
        """Say what the run will take, and what its memory does not allow."""
        kind = torch.finfo(next(self._trial.parameters()).dtype)
        left = self._settings.steps - len(self.history)
        seconds, budget = self.history.spent - self.begun, self._settings.budget
        rest = math.inf if budget is None else max(0.0, budget - seconds)
        entries, peak = info.rows * info.parameters, peak_memory(self._device)
        line.forecast(left, seconds, rest, entries * kind.bits // 8, peak)
        if info.gram == "dense" and self._settings.gram == "auto":
            need = info.rows * info.parameters * kind.bits // 8
            warnings.warn(
                f"The Jacobian takes {need / 2**30:.2g} GiB, more than memory= allows: the Gram "
                "matrix is formed instead, which squares the condition number and costs half of "
                "the digits. Raise memory= or use fewer points",
                stacklevel=5,
            )

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self._trial.named_parameters():
            p.copy_(values[name])

    def _asked(self, info: StepInfo, came: Interruption) -> str:
        """Why the run must end after this step: a callback or a signal, on any process."""
        calls = any([call(self, info) is True for call in self._settings.callbacks])
        if not self._processes.alone:
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
        if self._settings.tol is not None:
            value = history.error[-1] if history.error else history.loss[-1] if history else None
            if value is not None and value <= self._settings.tol and self._confirmed():
                return f"the tolerance {self._settings.tol:g} was reached"
        part = self._part if self._path is None else 1.0  # a checkpoint's run goes on when called
        budget = self._settings.budget
        if budget is not None and history.spent - self.begun >= part * budget:
            return f"the budget of {budget:g} s is spent"
        if self._stagnation(*_LEVEL) and self._points.reweigh(len(history)):
            # losses before and after do not compare
            self._validation.weights, self._best, self._rejected = self._points.weights, None, 0
            return ""
        wait = self._settings.patience
        if wait is not None and self._stagnation(max(1, wait // 2), self._slow) and self._revived():
            return ""
        reason = self._stagnation(wait, 0.01)
        self._stuck = bool(reason)
        return reason

    def _confirmed(self) -> bool:
        """Whether a loss that is small enough is so at fresh points, where no error is known."""
        if self.history.error or not self._points.squares:
            return True
        assert self._settings.tol is not None
        return self._validation.loss(len(self.history)) <= self._settings.tol

    @property
    def _slow(self) -> float:
        """The share by which the loss falls where a run is stuck; near a solution it falls fast."""
        history = self.history
        return 0.5 if history and history.loss[-1] < _EARLY * history.loss[0] else 0.01

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

    def _revived(self) -> bool:
        """Go on from stagnation with other points or parameters, where that may help.

        Points move where they are overfitted. Else the parameters are kicked, which leaves a narrow
        valley, as long as that lowers the loss at fresh points; and a run that is far from a
        solution starts anew. The best parameters are kept.
        """
        number, left = len(self.history), self._settings.steps - len(self.history)
        if not self._adaptive or not self._points.squares:
            return False
        own, fresh = self._points.loss(), self._validation.loss(number)
        if not self._matters(fresh):
            return False
        if self._drifting(own, fresh):
            self._points.concentrate(number)
            self._rejected = 0
            self.history.moved.append(number)
            return True
        best = math.inf if self._best is None else self._best["fresh"]
        taken = number - max(self.history.restarted, default=0)
        if left >= max(_TRY, taken / 2) and fresh < 0.5 * best:
            self._remember(fresh)
            self._go_on_from(self._kicked())
            return True
        if left >= taken and self._validation.relative(number) > _RESTART:
            self._remember(fresh)
            self._go_on_from(self._shuffled())
            return True
        return False

    def _drifting(self, own: float, fresh: float) -> bool:
        """Whether points are being learned by heart: seen early, but not in the last digits."""
        first = self.history.loss[0]
        early = fresh > _DRIFT * own and fresh > _EARLY * first
        return early or (overfitted(own, fresh) and fresh > _LATE * first)

    def _matters(self, loss: float) -> bool:
        """Whether a loss is more than round-off."""
        noise = torch.finfo(next(self._trial.parameters()).dtype).eps ** 1.3
        return loss > noise * self.history.loss[0]

    def _kicked(self) -> dict[str, Tensor]:
        """The parameters with a hundredth of their size in noise."""
        generator = self._generator()
        out = {}
        for name, p in self._trial.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            size = _KICK * p.detach().square().mean().sqrt()
            out[name] = p.detach() + size * noise if p.requires_grad else p.detach().clone()
        return out

    def _shuffled(self) -> dict[str, Tensor]:
        """The first parameters, shuffled within each tensor."""
        generator = self._generator()
        out = {}
        for name, p in self._trial.named_parameters():
            first = self._first[name].to(p)
            order = torch.randperm(p.numel(), generator=generator).to(p.device)
            out[name] = first.flatten()[order].view_as(p) if p.requires_grad else first
        return out

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._settings.seed + 7919 * len(self.history))

    def _go_on_from(self, params: Mapping[str, Tensor]) -> None:
        number = len(self.history)
        self._put(params)
        self._processes.adopt([*self._trial.parameters()])
        self._points.unsettle(number)
        dtype = next(self._trial.parameters()).dtype
        self.optimizer = self._made(dtype)
        self._rejected = 0
        self.history.restarted.append(number)

    def _made(self, dtype: torch.dtype) -> Optimizer:
        count = self._points.count
        return optimizer(self._trial, self._settings, dtype, self._processes, count)

    def _remember(self, fresh: float) -> None:
        if self._best is None or fresh < self._best["fresh"]:
            params = {n: p.detach().clone() for n, p in self._trial.named_parameters()}
            self._best = {"fresh": fresh, "params": params, "points": self._points.state()}

    def _keep_best(self) -> bool:
        """Go back to the best of several tries; whether that was not the last."""
        if self._best is None or self._validation.loss(len(self.history)) <= self._best["fresh"]:
            return False
        self._put(self._best["params"])
        self._points.restore(self._best["points"], len(self.history))
        self.history.forget(len(self.history))
        self._record_error()
        return True

    def _judge(self, reason: str, pace: float) -> Verdict:
        """The verdict on the network as it is."""
        number = len(self.history)
        if not self._points.squares:
            return Verdict(reason, self._stuck, math.nan, math.nan, math.nan)
        if not number:
            fresh, relative = self._validation.loss(0), self._validation.relative(0)
            return Verdict(reason, self._stuck, math.nan, fresh, relative)
        if tries := len(self.history.restarted):
            reason += f" (the best of {tries + 1} tries)"
        own, fresh = self._points.loss(), self._validation.loss(number)
        self.history.validate(own, fresh)
        relative = self._validation.relative(number)
        if not self._matters(fresh):  # where the solution is zero its terms are round-off too
            relative = min(relative, (fresh / self.history.loss[0]) ** 0.5)
        return Verdict(reason, self._stuck, own, fresh, relative, falling=pace)

    @property
    def _pace(self) -> float:
        """The share by which the loss fell in each of the last steps, 0 if they do not compare."""
        losses = self.history.loss
        if len(losses) <= _PACE or not self._points.settled(len(losses) - _PACE - 1):
            return 0.0
        return 1 - max(0.0, losses[-1] / losses[-1 - _PACE]) ** (1 / _PACE)

    @property
    def _fresh(self) -> float:
        return self.history.fresh[-1] if self.history.fresh else math.nan

    def _validate(self, number: int) -> None:
        """Look at fresh points, and move the run's own where they are overfitted."""
        if not number or number % self._settings.measure or not self._points.squares:
            return
        if self.history.validated and self.history.validated[-1] == number:
            return
        own, fresh = self._points.loss(), self._validation.loss(number)
        self.history.validate(own, fresh)
        if self._adaptive and self._drifting(own, fresh):
            self._points.concentrate(number)
            self.history.moved.append(number)

    def _step(self) -> StepInfo:
        start = time.perf_counter()
        number = len(self.history)
        self._validate(number)
        objective = self._points.at(number)
        info = stepped(self.optimizer, objective, self._trial, self._processes)
        self._say_nested()
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
        if self._processes.alone:
            return seconds
        own = torch.tensor([seconds], dtype=torch.float64, device=self._processes.device)
        return float(self._processes.gather([own], "decisions")[0].max())

    def _say_nested(self) -> None:
        """Say once that derivatives take the slower way."""
        reason = self._points.nested()
        if reason and not self._said and self._processes.rank == 0:
            self._said = True
            warnings.warn(
                f"Derivatives are nested automatic differentiation, which is slower: {reason}",
                stacklevel=4,
            )

    def _record_error(self) -> None:
        """Measure the error on the first process, for all of them."""
        if self._yardstick is None:
            return
        error = math.nan
        with torch.no_grad(), self._processes.together():
            if self._processes.rank == 0:
                error = self._yardstick.error(self._evaluated)
        self.history.measure(self._processes.share(error))

    def _evaluated(self, x: Tensor) -> Tensor:
        return self.network(x.to(next(self.network.parameters()).dtype))

    def _save(self) -> None:
        assert self._path is not None
        if self._processes.rank:
            return
        saved.save(
            self._path,
            {
                "run": self._identity,
                "trial": self._trial.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "history": self.history.as_dict(),
                "rejected": self._rejected,
                "looked": self.looked,
                "first": self._first,
                "best": self._best,
                "points": self._points.state(),
            },
        )

    def _resume(self, path: Path) -> None:
        state = None
        with self._processes.together():
            if self._processes.rank == 0 and path.exists():
                state = saved.load(path, self._identity)
        state = self._processes.share(state)
        if state is None:
            return
        saved.restore(path, self._trial, state["trial"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History.from_dict(state["history"])
        self._rejected = state["rejected"]
        if self.looked is None:  # else this process has looked since it was saved
            self.looked = state.get("looked")
        self._first, self._best = state["first"], state["best"]
        self._points.restore(state["points"], len(self.history))
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
