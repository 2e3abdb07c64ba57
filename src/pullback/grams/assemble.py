"""From maps and metrics to a Gram, in the form that fits sizes, memory and solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from .._core.errors import PullbackError, refuse_unknown
from .._core.processes import Processes
from ..maps import Covered
from .forms import Dense, Gram, Kernel, Operator, Rows
from .stack import Part, Stack

_PANEL = 2**27
FORMS = ("auto", "rows", "kernel", "dense", "matrix_free")


def assemble(parts: Sequence[Part], form: str, budget: int, prefers: str = "small") -> Gram:
    """The Gram of all parts together.

    Args:
        parts: linearized maps with their factors, over the same parameters.
        form: one of "rows", "kernel", "dense", "matrix_free", or "auto": the map's own closed
            form where it has one, else what fits the sizes.
        budget: bytes that one matrix may take.
        prefers: what the solver works from best: "rows", "panels" (rows, a few at a time where
            they do not fit), "small" (the smaller of the kernel and the dense Gram) or "products".
    """
    first = parts[0]
    if len(parts) > 1 and any(part.factor.couples_samples for part in parts):
        raise PullbackError(
            "The metric couples the samples of one forward call",
            f"the closure made {len(parts)} forward calls, whose samples it would not relate",
            "Pass the whole batch in one call",
        )
    if form == "auto" and len(parts) == 1:
        own = first.linear.closed_form(first.factor)
        if own is not None:
            return own
    stack = Stack(parts, first.linear.space, Processes())
    return assemble_stack(stack, None, form, budget, prefers)[0]


def assemble_stack(
    stack: Stack, white: Tensor | None, form: str, budget: int, prefers: str = "small"
) -> tuple[Gram, Tensor | None]:
    """The Gram of all processes' rows, and the r that goes with it.

    Args:
        stack: the rows.
        white: r of this process's rows; None on all processes or on none.
        form, budget, prefers: as for `assemble`; a map's own closed form is not used.
    """
    space, n, p, several = stack.space, stack.count, stack.space.size, not stack.processes.is_single
    if several:
        _refuse(stack)
    if form == "auto":
        form = choose(n, p, torch.finfo(space.dtype).bits // 8, budget, prefers)
    if form == "rows" and several and prefers == "panels":
        form = "panels"
    if form == "rows" and several and p <= n:
        a, white = stack.triangle(white)
        return Rows(a), white
    white = None if white is None else stack.processes.gather([white])[0]
    if form == "rows":
        return Rows(stack.rows()), white
    if form == "dense":
        return Dense(stack.dense(budget), n), white
    if form == "kernel":
        return StackedKernel(stack, budget), white
    if form == "panels":
        return StackedPanels(stack, budget), white
    refuse_unknown("Gram form", form, FORMS)
    push, pull = partial(stack.project, by="push"), partial(stack.lift, by="pull")
    return Operator(push, pull, (n, p), space.dtype, space.device), white


class StackedKernel(Kernel):
    """The kernel of a stack; many lifts are summed over the processes at once."""

    def __init__(self, stack: Stack, budget: int) -> None:
        super().__init__(stack.kernel(budget), stack.project, stack.lift, stack.space.size)
        self._stack, self._budget = stack, budget

    def diagonal(self) -> Tensor:
        return self._stack.squares(self._budget)

    def rows(self) -> Tensor:
        return self._stack.rows()

    def lift_rows(self, c: Tensor) -> Tensor:
        return self._lift(c)


class StackedPanels(Operator):
    """G by products with A and Aᵀ, and A itself a panel of rows at a time, never held whole."""

    def __init__(self, stack: Stack, budget: int) -> None:
        space = stack.space
        shape = stack.count, space.size
        super().__init__(stack.project, stack.lift, shape, space.dtype, space.device)
        # on a CPU little, for its cache; on a GPU enough to keep it busy
        self._bytes = _PANEL if space.device.type == "cpu" else max(_PANEL, budget // 4)
        self._stack = stack

    def compressed(self, columns: Callable[[Tensor], Tensor]) -> Tensor:
        empty = columns(self._stack.space.zeros(0, self.size))
        found = torch.cat([empty, *map(columns, self._stack.panels(self._bytes))])
        return self._stack.processes.gather([found], "rows")[0]


def _refuse(stack: Stack) -> None:
    if not stack.count:
        raise PullbackError(
            "The batch is empty", "no process has a sample", "Skip batches without samples"
        )
    if not stack.processes.all_agree(not any(part.factor.couples_samples for part in stack.parts)):
        raise PullbackError(
            "The metric couples the samples of a batch",
            f"they are on {stack.processes.size} processes, and it relates those of one alone",
            "Train on one process, or use a metric that measures samples one by one",
        )


def choose(n: int, p: int, itemsize: int, budget: int, prefers: str) -> str:
    """The form for n rows and p parameters: the small side, kept factored where it fits."""
    if prefers == "products":
        return "matrix_free"
    if prefers == "panels":
        return "rows" if n * p * itemsize <= budget else "panels"
    need = min(n, p) ** 2 * itemsize
    if need > budget:
        raise PullbackError(
            "The Gram does not fit the memory budget",
            f"its smaller side has {min(n, p)} rows and takes {need:.2g} bytes of {budget:.2g}",
            "Use solvers.ConjugateGradient, a smaller batch, or raise memory=",
        )
    fits = n * p * itemsize <= budget
    if p <= n:
        return "rows" if fits else "dense"
    return "rows" if fits and prefers == "rows" else "kernel"


def coverage(parts: Sequence[Part]) -> tuple[Covered, ...]:
    """How each parameter's share was computed, for the forms that pull blocks back."""
    return parts[0].pulled.coverage if parts and "pulled" in vars(parts[0]) else ()
