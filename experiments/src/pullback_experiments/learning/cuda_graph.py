"""Training steps captured once in a CUDA graph and replayed, where launches cost the most."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pullback import KFAC

#: (x, y) ↦ the loss, after clearing and filling all gradients
Gradient = Callable[[Tensor, Tensor], Any]
#: (x, y) ↦ nothing, the parameters moved
Step = Callable[[Tensor, Tensor], None]


class Captured:
    """Work on batches of one size: run eagerly a few times, then replayed from a CUDA graph.

    The first runs create the optimizer's state and warm up the libraries.
    """

    def __init__(self, work: Gradient, clear: Callable[[], None], eager_runs: int = 3) -> None:
        self._eager_runs = eager_runs
        self._work = work
        self._clear = clear
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static_inputs: tuple[Tensor, Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._warm_steps = 0

    @property
    def ready(self) -> bool:
        """Return True if the graph is captured."""
        return self._graph is not None

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Run the work on this batch."""
        if self._static_inputs is None or self._stream is None:
            self._static_inputs = (x.clone(), y.clone())
            self._stream = torch.cuda.Stream(x.device)
        for captured_input, new in zip(self._static_inputs, (x, y), strict=True):
            captured_input.copy_(new)
        if self._warm_steps < self._eager_runs:
            self._warm_steps += 1
            self._stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._stream):
                self._work(*self._static_inputs)
            torch.cuda.current_stream(x.device).wait_stream(self._stream)
            return
        if self._graph is None:
            self._clear()  # gradients then live in the graph's pool
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._work(*self._static_inputs)
        self._graph.replay()


def capture_step(optimizer: Optimizer, gradient: Gradient, *, fixed: bool) -> Step:
    """Return gradient and step, captured as far as the optimizer allows.

    With `fixed` rates the step is captured too, with the rates that it has at first; the optimizer
    must then not look at values from the host. Otherwise the gradient alone is. K-FAC has its own
    way with steps between statistics; those that take statistics run as they are.
    """
    if not fixed or isinstance(optimizer, KFAC):
        return _Gradients(optimizer, gradient)

    def step(x: Tensor, y: Tensor) -> None:
        gradient(x, y)
        optimizer.step()

    return Captured(step, optimizer.zero_grad)


class _Gradients:
    """Gradients come from a CUDA graph, except in K-FAC's statistics steps; `step` runs eagerly."""

    def __init__(self, optimizer: Optimizer, gradient: Gradient) -> None:
        self._optimizer = optimizer
        self._gradient = gradient
        self._captured = Captured(gradient, optimizer.zero_grad)
        groups = [group["params"] for group in optimizer.param_groups]
        self._params: list[Tensor] = list(chain.from_iterable(groups))
        self._filled: list[Tensor | None] | None = None

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Take one step on this batch."""
        if isinstance(self._optimizer, KFAC) and self._optimizer.statistics_due:
            self._gradient(x, y)
        else:
            self._optimizer.zero_grad()
            self._captured(x, y)
            self._attach_gradients()
        self._optimizer.step()

    def _attach_gradients(self) -> None:
        """Give the parameters the captured gradients, which a replay fills."""
        if not self._captured.ready:
            return
        if self._filled is None:
            self._filled = [p.grad for p in self._params]
        for p, grad in zip(self._params, self._filled, strict=True):
            p.grad = grad
