"""One step: the loss and its local picture, the damped system, and the record of what was done."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import Status
from .._core.processes import Processes
from .._core.products import full_precision
from .._core.space import ParameterSpace, relative_tolerance
from ..grams import FactoredGram, Gram, RowBlock
from ..maps import Covered
from ..metrics import Metric
from ..solvers import Damping, Path, Solution, Solver

Place = Callable[[Mapping[str, Tensor], Tensor], Mapping[str, Tensor]]
Solve = Callable[[Damping | None, Tensor | None], Solution]


class StepProblem(ABC):
    """L and its local picture at the current parameters.

    On several processes L, its gradient and Jᵀ∂L/∂z are those of all of them; parts and r are this
    process's own, and its parts may be none.
    """

    #: whether the rows were checked against autograd elsewhere
    proven: bool = False

    #: whose layers the rows may refer to
    model: nn.Module | None = None

    def __init__(self, params: dict[str, nn.Parameter], processes: Processes | None = None) -> None:
        self.params = params
        self.processes = Processes() if processes is None else processes
        self.space = ParameterSpace(params)
        self.loss = float("nan")
        self.gradient = self.space.zeros(0)
        #: NOT_REPRESENTABLE where r was asked for and does not exist
        self.whitening = Status.OK

    @abstractmethod
    def evaluate(self) -> str:
        """Fill `loss` and `gradient`; a non-empty answer says why the step must be rejected."""

    @abstractmethod
    def parts(self, metric: Metric, batch: Any) -> tuple[list[RowBlock], Tensor | None]:
        """The rows of A, and r where it is representable."""

    @abstractmethod
    def pulled(self) -> Tensor:
        """Jᵀ∂L/∂z: the gradient of what went through the recorded outputs."""

    @abstractmethod
    def losses(self, moves: Tensor, place: Place) -> Tensor:
        """L at place(w, move) for each row of moves, everything restored afterwards."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo what evaluating the loss disturbed."""

    def summed(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors, added up over all processes."""
        return self.processes.sum(tensors, "gradients")

    def broken(self) -> str:
        """Why neither loss nor gradient can be used, or nothing."""
        if not math.isfinite(self.loss):
            return f"the loss is not finite ({self.loss})"
        if not bool(torch.isfinite(self.gradient).all()):
            return "the gradient is not finite"
        return ""


@dataclass
class System:
    """(G + λ)x = g with g = Aᵀr + e: r where it is known, e what else the loss contains."""

    gram: Gram
    gradient: Tensor
    white: Tensor | None = None
    extra: Tensor | None = None
    #: why r is missing, where it should be there
    status: Status = Status.OK
    #: rows of A; a Gram may hold fewer
    rows: int = 0

    @classmethod
    def of(cls, gram: Gram, problem: StepProblem, white: Tensor | None, rows: int) -> System:
        """Use r where A is at hand; e is p.grad minus what the recorded outputs explain.

        Both were computed by the same arithmetic, so that without a regularizer they agree to
        round-off, whatever the precision of the forward pass.
        """
        gradient = problem.gradient
        if white is None or not isinstance(gram, FactoredGram):
            return cls(gram, gradient, status=problem.whitening, rows=rows)
        pulled = problem.pulled()
        extra = gradient - pulled
        limit = 100 * torch.finfo(gradient.dtype).eps * (gradient.norm() + pulled.norm())
        extra = extra if bool(extra.norm() > limit) else None
        return cls(gram, gradient, white, extra, rows=rows)

    def __neg__(self) -> System:
        white = None if self.white is None else -self.white
        extra = None if self.extra is None else -self.extra
        return replace(self, gradient=-self.gradient, white=white, extra=extra)

    def precisely(self) -> Any:
        """A decorator under which products with this system's matrices are exact in float32."""
        return full_precision(self.gram.device, float(self.gram.count) * self.gram.size)

    def solver(self, solver: Solver, state: Any) -> Solve:
        """(damping, about) ↦ the x that minimizes ‖A x − r‖² − 2eᵀx + λ‖x − about‖²."""

        @self.precisely()
        def solve(damping: Damping | None, about: Tensor | None) -> Solution:
            g, r = self.gradient, self.white
            if about is not None:
                g = g - self.gram.matvec(about)
                if r is not None and isinstance(self.gram, FactoredGram):
                    r = r - self.gram.project(about)
            if self.extra is not None and not solver.linear:
                r = None  # what the solver selects must see all of g
            if r is None or self.extra is None:
                found = solver.solve(state, g, damping, whitened=r)
            else:
                found = solver.solve(state, g - self.extra, damping, whitened=r)
                beside = solver.solve(state, self.extra, damping)
                status = found.status if beside.status is Status.OK else beside.status
                found = replace(found, x=found.x + beside.x, status=status)
            return found if about is None else replace(found, x=found.x + about)

        return solve

    def path(self, solver: Solver, state: Any) -> Path | None:
        """All solutions over damping; e joins r in the spectral coordinates."""
        if self.extra is None:
            return solver.path(state, self.gradient, self.white)
        path = solver.path(state, self.gradient - self.extra, self.white)
        beside = solver.path(state, self.extra)
        if path is None or beside is None:
            return None
        beyond = [p.beyond for p in (path, beside) if p.beyond is not None]
        outside = reduce(torch.add, beyond) if beyond else None
        return replace(path, gamma=path.gamma + beside.gamma, beyond=outside)


def explains(
    gram: Gram, parts: Sequence[RowBlock], problem: StepProblem, white: Tensor | None
) -> bool:
    """Whether cᵀ(AAᵀ)c is ‖Aᵀc‖², with Aᵀc by autograd: the layers' formulas at a glance."""
    processes, space = problem.processes, problem.space
    if gram.structure.holds == "operator":
        return True
    if not processes.all_agree(all(part.used_structure for part in parts)):
        return True
    counts = [part.count for part in parts]
    if white is None:
        c = torch.ones(sum(counts), dtype=gram.dtype, device=gram.device)
        c[::2] = -1
    else:
        c = white
    pieces = list(zip(parts, c.split(counts) if counts else (), strict=True))

    def summed(vectors: Iterable[Tensor]) -> Tensor:
        return problem.summed(reduce(torch.add, [*vectors] or [space.zeros(space.size)]))[0]

    pulled = problem.pulled() if white is not None else summed(x.pull(y) for x, y in pieces)
    every = processes.gather([c])[0]
    if isinstance(gram, FactoredGram) and gram.structure.holds == "kernel":
        energy, scale = every @ (gram.kernel() @ every), every.square() @ gram.kernel().diagonal()
    else:
        lifted = summed(x.lift(y) for x, y in pieces)
        energy = lifted.square().sum()
        scale = every.square().sum() * gram.trace() / len(every)
    own = getattr(parts[0].linearization, "graph", c).dtype if parts else gram.dtype
    limit = relative_tolerance(own, 10) * (scale + energy)
    return processes.all_agree(bool((energy - pulled.square().sum()).abs() <= limit))


@dataclass(frozen=True)
class StepInfo:
    """The record of one step; `float(info)` is its loss.

    Attributes:
        loss: the loss before the step.
        accepted: whether the parameters moved.
        step_size: the factor the step rule chose (times the param groups' lr).
        damping: the damping of the solution that was used.
        rank: directions used by the solver, where it knows.
        gram: the form in which the Gram was held.
        rows: n, the rows of A (samples × covectors).
        parameters: p, the columns of A.
        whitened: whether the solve started from r instead of g.
        status: how the solve ended; its value is a sentence.
        reason: why the step was rejected, or empty.
        new_loss: the loss after the step, where the step rule evaluated it.
        trials: evaluations of the loss at trial points.
        coverage: how each parameter's share of the Gram was computed.
    """

    loss: float
    accepted: bool
    step_size: float = 0.0
    damping: float = 0.0
    rank: int | None = None
    gram: str = ""
    rows: int = 0
    parameters: int = 0
    whitened: bool = False
    status: Status = Status.OK
    reason: str = ""
    new_loss: float | None = None
    trials: int = 0
    coverage: tuple[Covered, ...] = ()

    def __float__(self) -> float:
        return self.loss
