"""From maps and metrics to a Gram, in the form that fits sizes, memory and solver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.errors import PullbackError, refuse_unknown
from .distributed_rows import DistributedRowStack
from .forms import Dense, Gram, Kernel, Operator, Rows
from .row_stack import RowBlock, RowStack

#: bytes of the rows that are compressed at once on a CPU: few enough to lie beside A, many enough
#: for large matrix products
_CPU_PANEL_BYTES = 2**27
FORMS = ("auto", "rows", "kernel", "dense", "matrix_free")


@dataclass(frozen=True)
class GramForm:
    """In which form a Gram is held, and how large its matrix may be.

    Attributes:
        form: one of "rows", "kernel", "dense", "matrix_free", or "auto": the map's own closed
            form where it has one, else what fits the sizes.
        memory: bytes that one matrix may take.
    """

    form: str = "auto"
    memory: int = 2**30

    def __post_init__(self) -> None:
        refuse_unknown("gram", self.form, FORMS)


def assemble(
    row_blocks: Sequence[RowBlock], form: str, budget: int, prefers: str = "small"
) -> Gram:
    """The Gram of all row blocks together.

    Args:
        row_blocks: linearized maps with their factors, over the same parameters.
        form: as of `GramForm`.
        budget: bytes that one matrix may take.
        prefers: what the solver works from best: "rows", "panels" (rows, a few at a time where
            they do not fit), "small" (the smaller of the kernel and the dense Gram) or "products".
    """
    stack = RowStack(row_blocks, row_blocks[0].linearization.space)
    return assemble_stack(stack, None, form, budget, prefers)[0]


def assemble_stack(
    stack: RowStack, white: Tensor | None, form: str, budget: int, prefers: str = "small"
) -> tuple[Gram, Tensor | None]:
    """The Gram of all processes' rows, and the r that goes with it.

    Args:
        stack: the rows.
        white: r of this process's rows; None on all processes or on none.
        form, budget, prefers: as for `assemble`.
    """
    stack.refuse_unusable()
    if form == "auto":
        closed_form = stack.closed_form()
        if closed_form is not None:
            return closed_form, white
        itemsize = torch.finfo(stack.space.dtype).bits // 8
        form = choose_form(stack.count, stack.space.size, itemsize, budget, prefers)
    if form == "rows":
        form = stack.choose_rows(prefers)
    if form == "triangle" and isinstance(stack, DistributedRowStack):
        triangle, white = stack.triangle(white)
        return Rows(triangle), white
    if white is not None:
        white = stack.gather(white)
    return _make_gram(stack, form, budget), white


def _make_gram(stack: RowStack, form: str, budget: int) -> Gram:
    """The Gram in this form."""
    if form == "rows":
        return Rows(stack.rows())
    if form == "dense":
        return Dense(stack.dense(budget), stack.count)
    if form == "kernel":
        return StackedKernel(stack, budget)
    if form == "panels":
        return StackedPanels(stack, budget)
    refuse_unknown("Gram form", form, FORMS)
    shape = (stack.count, stack.space.size)
    return Operator(stack.push, stack.pull, shape, stack.space.dtype, stack.space.device)


class StackedKernel(Kernel):
    """The kernel of a stack; many lifts are summed over the processes at once.

    The kernel may be in float64 where A is in float32.
    """

    def __init__(self, stack: RowStack, budget: int) -> None:
        super().__init__(stack.kernel(budget), stack.project, stack.lift, stack.space.size)
        self.dtype = stack.space.dtype
        self._stack = stack
        self._budget = budget

    def lift(self, c: Tensor) -> Tensor:
        return super().lift(c.to(self.dtype))

    def diagonal(self) -> Tensor:
        return self._stack.diagonal(self._budget)

    def rows(self) -> Tensor:
        return self._stack.rows()

    def lift_rows(self, c: Tensor) -> Tensor:
        return self._lift(c.to(self.dtype))


class StackedPanels(Operator):
    """G by products with A and Aᵀ, and A itself a panel of rows at a time, never held whole."""

    def __init__(self, stack: RowStack, budget: int) -> None:
        space = stack.space
        shape = (stack.count, space.size)
        super().__init__(stack.project, stack.lift, shape, space.dtype, space.device)
        self._stack = stack
        self._panel_bytes = _CPU_PANEL_BYTES
        if space.device.type != "cpu":  # enough to keep a GPU busy
            self._panel_bytes = max(_CPU_PANEL_BYTES, budget // 4)

    def compress(self, columns: Callable[[Tensor], Tensor]) -> Tensor:
        empty = columns(self._stack.space.zeros(0, self.size))
        panels = map(columns, self._stack.panels(self._panel_bytes))
        return self._stack.gather(torch.cat([empty, *panels]))


def choose_form(n: int, p: int, itemsize: int, budget: int, prefers: str) -> str:
    """Return the form for n rows and p parameters: the smaller side, factored if it fits."""
    if prefers == "products":
        return "matrix_free"
    rows_fit = n * p * itemsize <= budget
    if prefers == "panels":
        if rows_fit:
            return "rows"
        return "panels"
    smaller_side_bytes = min(n, p) ** 2 * itemsize
    if smaller_side_bytes > budget:
        raise PullbackError(
            "The Gram does not fit the memory budget",
            f"its smaller side has {min(n, p)} rows and takes {smaller_side_bytes:.2g} bytes of "
            f"{budget:.2g}",
            "Use solvers.ConjugateGradient, a smaller batch, or gram=grams.GramForm(form, memory) "
            "with more memory",
        )
    if p <= n:
        if rows_fit:
            return "rows"
        return "dense"
    if rows_fit and prefers == "rows":
        return "rows"
    return "kernel"
