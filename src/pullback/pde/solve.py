"""Solve a PDE with a network and the natural gradient in function space."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from ..optim import NaturalGradient, Objective, StepInfo
from ..solvers import PseudoInverse, Solver
from ..steps import Step, TargetRatio
from . import checkpoint as saved
from .discretize import Sites, Trial, coefficients, nested, term
from .history import History
from .measure import Yardstick
from .plan import Plan, Refine
from .problem import Problem
from .progress import shown
from .sampling import Sampler
from .solution import Solution

#: told after every step; stops the run by returning True
Callback = Callable[["Run", StepInfo], Any]

_SAVE_EVERY = 60.0  # seconds between two checkpoints
_REJECTED = 30  # steps rejected in a row that end a run
_SPECTRUM = 2**24  # entries of A up to which its singular values are reported


def solve(
    problem: Problem,
    network: nn.Module,
    *,
    steps: int = 400,
    points: int | Mapping[str, int] | None = None,
    sampler: str | Sampler | None = None,
    seed: int = 0,
    resample: int | None = None,
    refine: Refine | None = None,
    solver: Solver | None = None,
    step: Step | None = None,
    gram: str = "auto",
    memory: int = 2**32,
    single: int = 0,
    slabs: int = 1,
    tol: float | None = None,
    patience: int | None = 50,
    budget: float | None = None,
    measure: int = 10,
    checkpoint: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    device: str | torch.device | None = None,
    progress: bool = True,
) -> Solution:
    """Fit the network to the problem's conditions; its parameters change in place.

    Args:
        problem: what must hold, and where.
        network: (N, d) ↦ (N, fields); its dtype is the precision of the solve.
        steps: at most this many.
        points: of the equations (others get a quarter), or by condition name.
        sampler: "grid", "gauss", "sobol", "lhs", "uniform"; a grid up to two dimensions by default.
        seed: of the points.
        resample: draw all points anew every so many steps.
        refine: move points to where the residual is large.
        solver, step, gram, memory: stages of the `NaturalGradient` underneath; by default every
            damped solution from one factorization, and the largest good trust radius.
        single: steps in float32 first.
        slabs: time is cut into so many pieces that are solved one after the other.
        tol: stop when the error (the loss, where no solution is known) is at most this.
        patience: stop when the loss fell by less than 1 % in so many steps.
        budget: seconds; a run with a checkpoint goes on from there when called again.
        measure: steps between two measurements of the error.
        checkpoint: file that the run is saved to, and resumed from where it exists.
        callbacks: called with (run, info) after every step; True stops the run.
        device: where to solve; by default where the network is.
        progress: show a line on the terminal.
    """
    least = dict(steps=(steps, 0), slabs=(slabs, 1), single=(single, 0), measure=(measure, 1))
    if any(not isinstance(n, int) or n < low for n, low in least.values()):
        raise PullbackError(
            "The run's length is not usable",
            f"got {', '.join(f'{name}={n!r}' for name, (n, _) in least.items())}",
            "Use integers steps ≥ 0, slabs ≥ 1, single ≥ 0, measure ≥ 1",
        )
    options: dict[str, Any] = dict(
        steps=steps, points=points, sampler=sampler, seed=seed, resample=resample, refine=refine,
        solver=solver, step=step, gram=gram, memory=memory, single=single, tol=tol,
        patience=patience, budget=budget, measure=measure, callbacks=callbacks, device=device,
        progress=progress,
    )  # fmt: skip
    if slabs > 1:
        from .slabs import march

        return march(problem, network, slabs, checkpoint, options)
    return Run(problem, network, checkpoint=checkpoint, **options).go()


class Run:
    """One solve in progress.

    Attributes:
        problem, network: what is solved, and with what.
        history: what happened so far.
        optimizer: the natural gradient.
    """

    def __init__(
        self,
        problem: Problem,
        network: nn.Module,
        *,
        steps: int,
        points: Any,
        sampler: Any,
        seed: int,
        resample: int | None,
        refine: Refine | None,
        solver: Solver | None,
        step: Step | None,
        gram: str,
        memory: int,
        single: int,
        tol: float | None,
        patience: int | None,
        budget: float | None,
        measure: int,
        checkpoint: str | Path | None,
        callbacks: Sequence[Callback],
        device: Any,
        progress: bool,
    ) -> None:
        if device is not None:
            network.to(device)
        like = _precision(network, device)
        self.problem, self.network = problem, network
        self._trial = Trial(network, problem.unknowns, like)
        _refuse_shape(problem, network, like)
        self._dtype, self._device = like.dtype, like.device
        size = sum(p.numel() for p in self._trial.parameters() if p.requires_grad)
        self._plan = Plan(
            problem,
            size,
            points=points,
            sampler=sampler,
            seed=seed,
            resample=resample,
            refine=refine,
        )
        self.optimizer = NaturalGradient(
            self._trial,
            solver=PseudoInverse(double=True) if solver is None else solver,
            step=TargetRatio() if step is None else step,
            gram=gram,
            memory=memory,
        )
        self._steps, self._single, self._tol, self._patience = steps, single, tol, patience
        self._budget, self._measure, self._callbacks = budget, measure, callbacks
        self._path = None if checkpoint is None else Path(checkpoint)
        self._progress = progress
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
        self._identity = {
            "problem": repr(problem),
            "parameters": [(n, list(p.shape)) for n, p in self._trial.named_parameters()],
            "dtype": str(self._dtype),
            "counts": self._plan.counts,
            "sampler": repr(self._plan.sampler),
            "schedule": repr((seed, resample, refine, single)),
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
            with shown(self.problem.name, self._steps, enabled=self._progress) as line:
                while not (stopped := self._finished()):
                    info = self._step()
                    line(len(self.history), info.loss, self.error)
                    if any([call(self, info) is True for call in self._callbacks]):
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
        if len(history) >= self._steps:
            return f"all {self._steps} steps were taken"
        if self._tol is not None:
            value = history.error[-1] if history.error else history.loss[-1] if history else None
            if value is not None and value <= self._tol:
                return f"the tolerance {self._tol:g} was reached"
        if self._rejected >= _REJECTED:
            return f"{_REJECTED} steps in a row could not lower the loss"
        wait = self._patience
        if wait is not None and self._still(len(history) - wait - 1):
            before = history.loss[-1 - wait]
            if history.loss[-1] > before - 0.01 * abs(before):  # energies may be negative
                return f"the loss fell by less than 1 % in {wait} steps"
        if self._budget is not None and history.spent - self.begun >= self._budget:
            return f"the budget of {self._budget:g} s is spent"
        return ""

    def _still(self, step: int) -> bool:
        """Whether points and precision stay the same from this step on."""
        refine = self._plan.refine
        settled = refine is None or refine.over(step)
        return step >= self._single and self._plan.resample is None and settled

    def _step(self) -> StepInfo:
        start = time.perf_counter()
        number = len(self.history)
        objective = self._at(number)
        info = self.optimizer.step(objective=objective)
        self._say_nested()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elapsed = time.perf_counter() - start
        if not info.accepted and "not finite" in info.reason:
            self._refuse_broken(objective, info.reason)
        self._rejected = 0 if info.accepted else self._rejected + 1
        history = self.history
        history.seconds.append(history.spent + elapsed)
        history.loss.append(info.loss)
        history.damping.append(info.damping)
        history.trials.append(info.trials)
        history.accepted.append(info.accepted)
        if len(history) % self._measure == 0:
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

    def _refuse_broken(self, objective: Objective, reason: str) -> None:
        params = dict(self._trial.named_parameters())
        for condition, item in zip(self.problem.conditions, objective.terms, strict=True):
            with torch.no_grad():
                z = item.map(params)
                bad = ~torch.isfinite(z).all(1)
                if not bool(bad.any()):
                    bad = ~torch.isfinite(item.slope(z)).all(1)
            if bool(bad.any()):
                where = self._sites[condition.name][0].x[bad.cpu()][0].tolist()
                raise PullbackError(
                    f"The residual of {condition.name!r} is not finite",
                    f"at {int(bad.sum())} of {len(bad)} points, such as {where}",
                    "Check the residual there (division, logarithm, root), or move the points",
                )
        raise PullbackError(
            "The loss has no finite gradient",
            f"the residuals are finite, but {reason}",
            "Check the network and the residuals for roots and divisions at zero",
        )

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
        from .sampling import Points

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


def _precision(network: nn.Module, device: Any) -> Tensor:
    """A parameter of the network, whose dtype and device are those of the solve."""
    params = list(network.parameters())
    if not params:
        raise PullbackError(
            "The network has no parameters", "there is nothing to fit", "Use mlp(…)"
        )
    kinds = {(p.dtype, p.device) for p in params}
    if len(kinds) > 1 or params[0].dtype not in (torch.float32, torch.float64):
        found = ", ".join(sorted(f"{d} on {v}" for d, v in kinds))
        raise PullbackError(
            "The network's precision cannot be used",
            f"its parameters are {found}",
            "Use one dtype, float64 or float32, on one device: network.double().to(device)",
        )
    for name, buffer in network.named_buffers():
        mismatch = buffer.is_floating_point() and buffer.dtype != params[0].dtype
        if mismatch or buffer.device != params[0].device:
            raise PullbackError(
                f"The buffer {name!r} does not match the network's parameters",
                f"{buffer.dtype} on {buffer.device} beside {params[0].dtype} on {params[0].device}",
                "Convert the whole network: network.to(dtype, device)",
            )
    return params[0]


@torch.no_grad()
def _refuse_shape(problem: Problem, network: nn.Module, like: Tensor) -> None:
    """The network must take d coordinates and give one value per field."""
    low, high = problem.domain.low.to(like), problem.domain.high.to(like)
    n, names = len(problem.fields) + 2, problem.domain.names
    x = low + (high - low) * torch.linspace(0.3, 0.6, n).to(like)[:, None]
    buffers = {name: b.clone() for name, b in network.named_buffers()}
    try:
        out, again, first = network(x), network(x), network(x[:2])
        shape = tuple(out.shape)
    except PullbackError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        raise PullbackError(
            "The network does not take the domain's points",
            f"at points of shape ({n}, {problem.domain.dim}): {error!r:.300}",
            f"Its input must have {len(names)} coordinates ({', '.join(names)})",
        ) from error
    finally:  # running statistics, which evaluating may have changed
        for name, b in network.named_buffers():
            b.copy_(buffers[name])
    if shape != (n, len(problem.fields)):
        raise PullbackError(
            "The network's output does not fit the fields",
            f"{n} points gave shape {shape}, and the fields are {', '.join(problem.fields)}",
            f"Its output must have {len(problem.fields)} entries per point",
        )
    same = {"random": (out, again), "dependent on the other points": (out[:2], first)}
    for what, (one, two) in same.items():
        if not torch.allclose(one, two, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise PullbackError(
                f"The network's value at a point is {what}",
                "two evaluations differ",
                "Call network.eval(), or leave out dropout and batch norms",
            )
