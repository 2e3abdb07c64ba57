"""One solve in progress: steps, stops, checkpoints."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._core.errors import PullbackError
from .._core.processes import Processes
from ..optim import StepInfo
from . import checkpoint as saved
from .checks import precision, refuse_shape
from .collocation import Collocation
from .discretize import Trial, coefficients
from .history import History
from .measure import Yardstick
from .method import optimizer, stepped
from .plan import Plan
from .problem import Problem
from .progress import shown
from .settings import Settings
from .signals import Interruption, held_back
from .solution import Solution

_SAVE_EVERY = 60.0  # seconds between two checkpoints
_REJECTED = 30  # steps rejected in a row that end a run
_SIGNAL = "a process was interrupted"


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
        self._processes = _processes(settings.group)
        self.problem, self.network = problem, network
        self._trial = Trial(network, problem.unknowns, like)
        refuse_shape(problem, network, like)
        self._device = like.device
        size = sum(p.numel() for p in self._trial.parameters() if p.requires_grad)
        self._settings = settings
        plan = Plan(
            problem,
            size,
            points=settings.points,
            sampler=settings.sampler,
            seed=settings.seed,
            resample=settings.resample,
            refine=settings.refine,
        )
        self._processes.adopt([*self._trial.parameters(), *self._trial.buffers()])
        self.optimizer = optimizer(self._trial, settings, like.dtype, self._processes)
        self._points = Collocation(
            problem, self._trial, plan, like, settings.single, self._processes
        )
        self._path = None if checkpoint is None else Path(checkpoint)
        self.history = History()
        self._yardstick = Yardstick(problem, like) if problem.known else None
        self._rejected = 0
        self._said = False
        #: seconds spent before this call, by a run that it goes on with
        self.begun = 0.0
        self._identity = {
            "problem": repr(problem),
            "conditions": self._points.fingerprints(),
            "parameters": [(n, list(p.shape)) for n, p in self._trial.named_parameters()],
            "dtype": str(like.dtype),
            "counts": plan.counts,
            "sampler": repr(plan.sampler),
            "schedule": repr((settings.seed, settings.resample, settings.refine, settings.single)),
        }
        self._processes.same("what they solve", self._identity, "Call solve alike on all processes")

    @property
    def error(self) -> float:
        """The last measured error, NaN where no solution is known."""
        return self.history.error[-1] if self.history.error else float("nan")

    @property
    def unknowns(self) -> dict[str, float]:
        """The coefficients now."""
        found = coefficients(dict(self._trial.named_parameters()))
        return {n: p.item() for n, p in found.items()}

    def go(self) -> Solution:
        """Step until a reason to stop; what was done is kept whatever happens."""
        if self._path is not None:
            self._resume(self._path)
        self.begun = self.history.spent
        due = self.begun + _SAVE_EVERY
        self._record_error()
        start = {n: p.detach().clone() for n, p in self._trial.named_parameters()}
        stopped, orderly = "", False
        show = self._settings.progress and self._processes.rank == 0
        try:
            with (
                held_back(not self._processes.alone) as came,
                shown(self.problem.name, self._settings.steps, enabled=show) as line,
            ):
                while not (stopped := self._finished()):
                    info = self._step()
                    line(len(self.history), info.loss, self.error)
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
                self._put(start)
            self._record_error()
            if self._path is not None and len(self.history):
                with self._processes.together() if orderly else nullcontext():
                    self._save()
        if stopped == _SIGNAL:
            came.end()
        solution = Solution(
            self.problem,
            self.network,
            self.history,
            unknowns=self.unknowns,
            stopped=stopped,
            loss=self._points.loss(),
            spectrum=self._points.spectrum(),
            nested=self._points.nested(),
        )
        came.repeat()
        return solution

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
            calls, came.number = bool(every[0]), int(every[1])
        if came.number:
            return _SIGNAL
        return "a callback asked for it" if calls else ""

    def _finished(self) -> str:
        """Why the run ends here, or nothing."""
        history = self.history
        if len(history) >= self._settings.steps:
            return f"all {self._settings.steps} steps were taken"
        if self._settings.tol is not None:
            value = history.error[-1] if history.error else history.loss[-1] if history else None
            if value is not None and value <= self._settings.tol:
                return f"the tolerance {self._settings.tol:g} was reached"
        if self._rejected >= _REJECTED:
            return f"{_REJECTED} steps in a row could not lower the loss"
        wait = self._settings.patience
        if wait is not None and self._points.settled(len(history) - wait - 1):
            before = history.loss[-1 - wait]
            if history.loss[-1] > before - 0.01 * abs(before):  # energies may be negative
                return f"the loss fell by less than 1 % in {wait} steps"
        if (
            self._settings.budget is not None
            and history.spent - self.begun >= self._settings.budget
        ):
            return f"the budget of {self._settings.budget:g} s is spent"
        return ""

    def _step(self) -> StepInfo:
        start = time.perf_counter()
        number = len(self.history)
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
        if self._yardstick is not None:
            with torch.no_grad():
                self.history.measure(self._yardstick.error(self._evaluated))

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
        self._points.restore(state["points"], len(self.history))


def _processes(group: Any) -> Processes:
    """Those of the group, or all that `torch.distributed` knows."""
    known = dist.is_available() and dist.is_initialized()
    if group is None and not known and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PullbackError(
            "The processes do not know each other",
            f"torchrun started {os.environ['WORLD_SIZE']}, and each would solve the whole problem",
            "Call torch.distributed.init_process_group() first",
        )
    return Processes(dist.group.WORLD if group is None and known else group)
