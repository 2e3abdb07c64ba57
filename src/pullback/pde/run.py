"""One solve in progress: steps, stops, checkpoints."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ..optim import StepInfo
from . import checkpoint as saved
from .checks import precision, refuse_broken, refuse_shape
from .collocation import Collocation
from .discretize import Trial, coefficients
from .history import History
from .measure import Yardstick
from .method import optimizer, stepped
from .plan import Plan
from .problem import Problem
from .progress import shown
from .settings import Settings
from .solution import Solution

_SAVE_EVERY = 60.0  # seconds between two checkpoints
_REJECTED = 30  # steps rejected in a row that end a run


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
        self.optimizer = optimizer(self._trial, settings, like.dtype)
        self._points = Collocation(problem, self._trial, plan, like, settings.single)
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
        if self._path is not None and self._path.exists():
            self._resume(self._path)
        self.begun = self.history.spent
        due = self.begun + _SAVE_EVERY
        self._record_error()
        start = {n: p.detach().clone() for n, p in self._trial.named_parameters()}
        stopped = ""
        try:
            with shown(
                self.problem.name, self._settings.steps, enabled=self._settings.progress
            ) as line:
                while not (stopped := self._finished()):
                    info = self._step()
                    line(len(self.history), info.loss, self.error)
                    if any([call(self, info) is True for call in self._settings.callbacks]):
                        stopped = "a callback asked for it"
                        break
                    if self.history.spent >= due and self._path is not None:
                        self._save()
                        due = self.history.spent + _SAVE_EVERY
        finally:
            self._points.full(len(self.history))
            if not len(self.history):  # refused, perhaps after rounding to single precision
                self._put(start)
            self._record_error()
            if self._path is not None and len(self.history):
                self._save()
        return Solution(
            self.problem,
            self.network,
            self.history,
            unknowns=self.unknowns,
            stopped=stopped,
            loss=self._points.loss(),
            spectrum=self._points.spectrum(),
            nested=self._points.nested(),
        )

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self._trial.named_parameters():
            p.copy_(values[name])

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
        info = stepped(self.optimizer, objective, self._trial)
        self._say_nested()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elapsed = time.perf_counter() - start
        if not info.accepted and "not finite" in info.reason:
            params = {n: p.detach() for n, p in self._trial.named_parameters()}
            refuse_broken(
                self.problem.conditions, objective.terms, self._points.sites, params, info.reason
            )
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

    def _say_nested(self) -> None:
        """Say once that derivatives take the slower way."""
        reason = self._points.nested()
        if reason and not self._said:
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
        state = saved.load(path, self._identity)
        saved.restore(path, self._trial, state["trial"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History.from_dict(state["history"])
        self._rejected = state["rejected"]
        self._points.restore(state["points"], len(self.history))
