"""A training step captured once in a CUDA graph and replayed, where launches cost the most."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

#: steps before the capture, which create the optimizer's state and warm up the libraries
_WARM = 3


class GraphedStep:
    """Gradient and step for batches of one size, with the optimizer's rates as they were at first.

    The first few steps run as they are and count as training; the next one is captured. The
    optimizer must not look at values from the host.

    Args:
        optimizer: whose step is captured.
        gradient: (x, y) ↦ the loss, after clearing and filling all gradients.
    """

    def __init__(self, optimizer: Optimizer, gradient: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._optimizer, self._gradient = optimizer, gradient
        self._graph: torch.cuda.CUDAGraph | None = None
        self._held: tuple[Tensor, Tensor] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._done = 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """One step on this batch."""
        if self._held is None or self._stream is None:
            self._held, self._stream = (x.clone(), y.clone()), torch.cuda.Stream(x.device)
        for held, given in zip(self._held, (x, y), strict=True):
            held.copy_(given)
        if self._done < _WARM:
            self._done += 1
            self._stream.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(self._stream):
                self._step()
            torch.cuda.current_stream(x.device).wait_stream(self._stream)
            return
        if self._graph is None:
            self._optimizer.zero_grad(set_to_none=True)  # gradients then live in the graph's pool
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step()
        self._graph.replay()

    def _step(self) -> None:
        assert self._held is not None
        self._gradient(*self._held)
        self._optimizer.step()
