"""One solve in progress: points, steps, stops, checkpoints."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim import KFAC, NaturalGradient, Objective, StepInfo
from ..solvers import PseudoInverse
from ..steps import TargetRatio
from . import checkpoint as saved
from .checks import precision, refuse_broken, refuse_shape
from .discretize import Sites, Trial, coefficients, fingerprint, nested, term
from .history import History
from .measure import Yardstick
from .plan import Plan
from .problem import Problem
from .progress import shown
from .sampling import Points
from .settings import Settings
from .solution import Solution

_SAVE_EVERY = 60.0  # seconds between two checkpoints
_REJECTED = 30  # steps rejected in a row that end a run
_CUT = 5e-14  # singular values below this share of the largest are noise, in float64
_SPECTRUM = 2**22  # entries of A up to which its singular values are reported


def _spectral(dtype: torch.dtype) -> PseudoInverse:
    """All dampings from one factorization, of singular values down to the noise.

    The usual cut at max(n, p)·ε leaves directions out that the last digits need: the loss then
    stalls, for some seeds at errors of 1e-9 (`benchmarks/trust.py`).
    """
    return PseudoInverse(rcond=_CUT if dtype == torch.float64 else None, double=True)


def _optimizer(trial: Trial, settings: Settings, dtype: torch.dtype) -> Optimizer:
    if settings.optimizer is not None:
        return settings.optimizer(trial)
    return NaturalGradient(
        trial,
        solver=settings.solver or _spectral(dtype),
        step=settings.step or TargetRatio(),
        gram=settings.gram,
        memory=settings.memory,
    )


def _stepped(optimizer: Optimizer, objective: Objective, trial: Trial) -> StepInfo:
    if isinstance(optimizer, NaturalGradient):
        return optimizer.step(objective=objective)
    if isinstance(optimizer, KFAC):
        loss = optimizer.step(objective=objective)
        done = optimizer.info
        return StepInfo(loss, done.accepted, damping=done.damping, reason=done.reason)

    def closure() -> Any:  # torch's closures return a float
        optimizer.zero_grad()
        value = objective.loss(dict(trial.named_parameters()))
        value.backward()
        return value.detach()

    return StepInfo(float(optimizer.step(closure)), accepted=True)


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
        self._dtype, self._device = like.dtype, like.device
        size = sum(p.numel() for p in self._trial.parameters() if p.requires_grad)
        self._settings = settings
        self._plan = Plan(
            problem,
            size,
            points=settings.points,
            sampler=settings.sampler,
            seed=settings.seed,
            resample=settings.resample,
            refine=settings.refine,
        )
        self.optimizer = _optimizer(self._trial, settings, like.dtype)
        self._single = settings.single
        self._path = None if checkpoint is None else Path(checkpoint)
        self.history = History()
        self._yardstick = Yardstick(problem, like) if problem.known else None
        self._sites: dict[str, Sites] = {}
        self._drawn: int | None = None
        self._objective: Objective | None = None
        self._rejected = 0
        self._said = False
        self._refined: int | None = None
        #: seconds spent before this call, by a run that it goes on with
        self.begun = 0.0
        self._sites, self._drawn = self._plan.draw(self._plan.at(0)), self._plan.at(0)
        self._identity = {
            "problem": repr(problem),
            "conditions": [
                fingerprint(problem, c, self._sites[c.name]) for c in problem.conditions
            ],
            "parameters": [(n, list(p.shape)) for n, p in self._trial.named_parameters()],
            "dtype": str(self._dtype),
            "counts": self._plan.counts,
            "sampler": repr(self._plan.sampler),
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
            self._trial.to(self._dtype)
            if not len(self.history):  # refused, perhaps after rounding to single precision
                self._put(start)
            if self._objective is not None and len(self.history) <= self._single:
                self._objective = self._build(self._dtype)
            self._record_error()
            if self._path is not None and len(self.history):
                self._save()
        return Solution(
            self.problem,
            self.network,
            self.history,
            unknowns=self.unknowns,
            stopped=stopped,
            loss=self._loss(),
            spectrum=self._spectrum(),
            nested="" if self._objective is None else nested(self._objective.terms),
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
        if wait is not None and self._still(len(history) - wait - 1):
            before = history.loss[-1 - wait]
            if history.loss[-1] > before - 0.01 * abs(before):  # energies may be negative
                return f"the loss fell by less than 1 % in {wait} steps"
        if (
            self._settings.budget is not None
            and history.spent - self.begun >= self._settings.budget
        ):
            return f"the budget of {self._settings.budget:g} s is spent"
        return ""

    def _still(self, step: int) -> bool:
        """Whether points and precision stay the same from this step on."""
        refine = self._plan.refine
        settled = refine is None or refine.over(step)
        squares = self._objective is None or all(t.whitened for t in self._objective.terms)
        # an energy does not go to zero: a share of it says nothing about what is left
        return step >= self._single and self._plan.resample is None and settled and squares

    def _step(self) -> StepInfo:
        start = time.perf_counter()
        number = len(self.history)
        objective = self._at(number)
        info = _stepped(self.optimizer, objective, self._trial)
        self._say_nested()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elapsed = time.perf_counter() - start
        if not info.accepted and "not finite" in info.reason:
            params = {n: p.detach() for n, p in self._trial.named_parameters()}
            refuse_broken(
                self.problem.conditions, objective.terms, self._sites, params, info.reason
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

    def _at(self, number: int) -> Objective:
        """The objective at the points of this step."""
        drawn, refine = self._plan.at(number), self._plan.refine
        dtype = torch.float32 if number < self._single else self._dtype
        self._trial.to(dtype)
        new = self._objective is None
        if drawn != self._drawn:
            self._sites, self._drawn, new = self._plan.draw(drawn), drawn, True
        elif refine is not None and refine.due(number) and self._refined != number:
            self._sites, new = self._plan.refined(self._sites, self._trial, number), True
            self._refined = number  # an interrupted step finds its points as they were
        if number == self._single or (number == 0 and self._single):
            new = True
        if new:
            self._objective = self._build(dtype)
        assert self._objective is not None
        return self._objective

    def _build(self, dtype: torch.dtype) -> Objective:
        """The points themselves stay in float64: rounded ones would lie beside the boundary."""
        terms = []
        for c in self.problem.conditions:
            sites = tuple(p.to(dtype, self._device) for p in self._sites[c.name])
            terms.append(term(self.problem, c, self._trial, sites))
        return Objective(terms)

    def _say_nested(self) -> None:
        """Say once that derivatives take the slower way."""
        reason = "" if self._objective is None else nested(self._objective.terms)
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

    @torch.no_grad()
    def _loss(self) -> float:
        """The loss of the network as it is now."""
        if self._objective is None:
            return float("nan")
        params = {n: p.detach() for n, p in self._trial.named_parameters()}
        return sum(float(t.loss(t.map(params))) for t in self._objective.terms)

    def _spectrum(self) -> Tensor | None:
        if self._objective is None:
            return None
        params = dict(self._trial.named_parameters())
        linears = [item.map.linearize(params) for item in self._objective.terms]
        entries = sum(x.value.numel() for x in linears) * linears[0].space.size
        if entries > _SPECTRUM or any(not t.whitened for t in self._objective.terms):
            return None
        return torch.linalg.svdvals(torch.cat([x.rows() for x in linears]).cpu())

    def _save(self) -> None:
        assert self._path is not None
        saved.save(
            self._path,
            {
                "run": self._identity,
                "trial": self._trial.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "history": self.history.as_dict(),
                "drawn": self._drawn,
                "rejected": self._rejected,
                "refined": self._refined,
                "sites": {
                    name: [(p.x, p.weights, p.normals) for p in sites]
                    for name, sites in self._sites.items()
                },
            },
        )

    def _resume(self, path: Path) -> None:
        state = saved.load(path, self._identity)
        saved.restore(path, self._trial, state["trial"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = History.from_dict(state["history"])
        self._drawn, self._rejected = state["drawn"], state["rejected"]
        self._refined = state["refined"]
        self._sites = {
            name: tuple(Points(*parts) for parts in sites) for name, sites in state["sites"].items()
        }
        if self._sites and len(self.history) > self._single:
            self._objective = self._build(self._dtype)
