"""One step: the loss and its local model, the damped system, and the record of what was done."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import Status
from .._core.products import full_precision
from .._core.space import ParameterSpace, relative_tolerance
from ..grams import FactoredGram, Gram, RowBlock, RowStack
from ..maps import Covered
from ..metrics import Metric
from ..solvers import Damping, Path, Solution, Solver

#: (parameters, move) ↦ the parameters after the move
Displace = Callable[[Mapping[str, Tensor], Tensor], Mapping[str, Tensor]]
Solve = Callable[[Damping | None, Tensor | None], Solution]


@dataclass(frozen=True)
class FactorizedSystem:
    """What a solver gives after it has factorized the Gram, with float32 products at full accuracy.

    Attributes:
        solve: (damping, center) ↦ the x that minimizes ‖A x − r‖² − 2eᵀx + λ‖x − center‖².
        path: the solution as a function of the damping; None if the solver has none.
        inner_products: vectors (k, p) ↦ x_iᵀG x_j, (k, k).
    """

    solve: Solve
    path: Callable[[], Path | None]
    inner_products: Callable[[Tensor], Tensor]


class StepProblem(ABC):
    """L and its local model at the current parameters.

    On several processes (`distributed.py`) L, its gradient and Jᵀ∂L/∂z are those of all of them;
    row blocks and r are this process's own, and it may have none.
    """

    #: whether the rows were checked against autograd elsewhere
    proven: bool = False

    #: whose layers the rows may refer to
    model: nn.Module | None = None

    #: ∇L, flat, once `evaluate` has run
    gradient: Tensor

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.params = params
        self.space = ParameterSpace(params)
        self.loss = float("nan")
        #: NOT_REPRESENTABLE where r was asked for and does not exist
        self.whitening = Status.OK

    @abstractmethod
    def evaluate(self) -> str:
        """Fill `loss` and `gradient`; a non-empty answer says why the step must be rejected."""

    @abstractmethod
    def row_blocks(self, metric: Metric, batch: Any) -> tuple[list[RowBlock], Tensor | None]:
        """Return the rows of A, and r where it is representable."""

    @abstractmethod
    def pulled_gradient(self) -> Tensor:
        """Return Jᵀ∂L/∂z, the gradient of what went through the recorded outputs."""

    @abstractmethod
    def losses(self, moves: Tensor, displace: Displace) -> Tensor:
        """Return L at displace(w, move) for each row of moves; restore everything afterwards."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo what evaluating the loss disturbed."""

    def stack_rows(self, row_blocks: Sequence[RowBlock]) -> RowStack:
        """Return the rows of all processes."""
        return RowStack(row_blocks, self.space)

    def sum_tensors(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors, added up over all processes."""
        return list(tensors)

    def all_agree(self, flag: bool) -> bool:
        """Return True if the flag is true on all processes."""
        return flag

    def find_fault(self) -> str:
        """Return why loss or gradient cannot be used; empty if they can."""
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
        """Return the system of a problem, with r and e where A is at hand.

        e is p.grad minus what the recorded outputs explain.

        Both were computed by the same arithmetic, so that without a regularizer they agree to
        round-off, whatever the precision of the forward pass.
        """
        gradient = problem.gradient
        if white is None or not isinstance(gram, FactoredGram):
            return cls(gram, gradient, status=problem.whitening, rows=rows)
        pulled = problem.pulled_gradient()
        extra = gradient - pulled
        round_off = 100 * torch.finfo(gradient.dtype).eps * (gradient.norm() + pulled.norm())
        if bool(extra.norm() <= round_off):
            extra = None
        return cls(gram, gradient, white, extra, rows=rows)

    def __neg__(self) -> System:
        white = None if self.white is None else -self.white
        extra = None if self.extra is None else -self.extra
        return replace(self, gradient=-self.gradient, white=white, extra=extra)

    def factorize(self, solver: Solver) -> FactorizedSystem:
        """Let the solver factorize the Gram, and return what it then gives."""
        state = self._in_full_precision(solver.init)(self.gram)
        return FactorizedSystem(
            solve=self._make_solve(solver, state),
            path=self._in_full_precision(partial(self._find_path, solver, state)),
            inner_products=self._in_full_precision(self.gram.inner_products),
        )

    def _in_full_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with float32 products at full accuracy, whatever TF32 allows."""
        if self.gram.device.type != "cuda":
            return function

        def run_in_full_precision(*arguments: Any) -> Any:
            with full_precision(self.gram.device, float(self.gram.count) * self.gram.size):
                return function(*arguments)

        return run_in_full_precision

    def _make_solve(self, solver: Solver, state: Any) -> Solve:
        """Return the `solve` of `FactorizedSystem`."""

        @self._in_full_precision
        def solve(damping: Damping | None, center: Tensor | None) -> Solution:
            if center is None:
                return self._solve(solver, state, damping)
            solution = self._shift(center)._solve(solver, state, damping)
            return replace(solution, x=solution.x + center)

        return solve

    def _shift(self, center: Tensor) -> System:
        """Return the system that x − center solves."""
        white = self.white
        if white is not None and isinstance(self.gram, FactoredGram):
            white = white - self.gram.project(center)
        return replace(self, gradient=self.gradient - self.gram.matvec(center), white=white)

    def _solve(self, solver: Solver, state: Any, damping: Damping | None) -> Solution:
        """Return (G + λ)⁺g, from r and e where they are known."""
        if self.extra is None:
            return solver.solve(state, self.gradient, damping, whitened=self.white)
        if self.white is None or not solver.linear:  # what a solver selects must see all of g
            return solver.solve(state, self.gradient, damping)
        from_outputs = solver.solve(state, self.gradient - self.extra, damping, whitened=self.white)
        from_extra = solver.solve(state, self.extra, damping)
        status = from_outputs.status if from_extra.status is Status.OK else from_extra.status
        return replace(from_outputs, x=from_outputs.x + from_extra.x, status=status)

    def _find_path(self, solver: Solver, state: Any) -> Path | None:
        """Return the solution as a function of the damping; None if the solver has none."""
        if self.extra is None:
            return solver.path(state, self.gradient, self.white)
        from_outputs = solver.path(state, self.gradient - self.extra, self.white)
        from_extra = solver.path(state, self.extra)
        if from_outputs is None or from_extra is None:
            return None
        outside = [p.beyond for p in (from_outputs, from_extra) if p.beyond is not None]
        return replace(
            from_outputs,
            gamma=from_outputs.gamma + from_extra.gamma,
            beyond=reduce(torch.add, outside) if outside else None,
        )


def agrees_with_autograd(
    gram: Gram, stack: RowStack, problem: StepProblem, white: Tensor | None
) -> bool:
    """Return True if cᵀ(AAᵀ)c is ‖Aᵀc‖² for one c with Aᵀc by autograd, or all is by autograd.

    The left side is by the formulas of the layers, which a changed model may have made wrong. c is
    r where it is known, since Aᵀr is known too.
    """
    if gram.structure.holds == "operator":
        return True
    row_blocks = stack.row_blocks
    if not problem.all_agree(all(bool(block.coverage) for block in row_blocks)):
        return True
    if white is None:
        c = torch.ones(sum(block.count for block in row_blocks), dtype=gram.dtype)
        c[::2] = -1
        c = c.to(gram.device)
        pulled = stack.pull(stack.gather(c))
    else:
        c = white
        pulled = problem.pulled_gradient()
    all_c = stack.gather(c)
    if isinstance(gram, FactoredGram) and gram.structure.holds == "kernel":
        kernel = gram.kernel()
        all_c = all_c.to(kernel.dtype)
        energy = all_c @ (kernel @ all_c)
        scale = all_c.square() @ kernel.diagonal()
    else:
        energy = stack.lift(all_c).square().sum()
        scale = all_c.square().sum() * gram.trace() / len(all_c)
    limit = relative_tolerance(_forward_dtype(row_blocks, gram), 10) * (scale + energy)
    return problem.all_agree(bool((energy - pulled.square().sum()).abs() <= limit))


def _forward_dtype(row_blocks: Sequence[RowBlock], gram: Gram) -> torch.dtype:
    """Return the dtype of the replayed forward pass, the Gram's where nothing was replayed."""
    if not row_blocks:
        return gram.dtype
    graph = getattr(row_blocks[0].linearization, "graph", None)
    return gram.dtype if graph is None else graph.dtype


@dataclass(frozen=True)
class StepInfo:
    """The record of one step; `float(info)` and `info.item()` are its loss.

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

    def item(self) -> float:
        """Return the loss, as the tensor has it that torch's optimizers return."""
        return self.loss
