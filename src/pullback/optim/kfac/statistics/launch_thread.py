"""A second thread that launches kernels, while a backward pass launches its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from ....maps.record import Entry

_WAITING = 2**28  # bytes of cotangents that wait to be measured


class LaunchThread:
    """Does tasks in their order, on the stream on which it was made.

    To launch the statistics' kernels may take the host longer than the GPU to run them. The engine
    launches those of a backward pass without Python, so that two threads hardly wait for each
    other. A task's tensors are computed on the same stream, and hence there when it is its turn.
    """

    def __init__(self, device: torch.device, entries: Sequence[Entry]) -> None:
        self._inputs = [(entry.input, entry.input._version) for entry in entries]
        self._device = device
        self._stream = _get_stream(device)
        # without a circle of references, which would keep the inputs
        self._thread = ThreadPoolExecutor(1, "pullback", _prepare, (device, self._stream))
        self._tasks: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def do(self, task: Callable[[], Any], cotangent: Tensor | None = None) -> None:
        """Do a task on the thread, or at once on a stream other than the thread's own.

        The task keeps the `cotangent` alive. Where too much memory is kept, wait for earlier tasks.
        """
        if _get_stream(self._device) != self._stream:
            self.join()
            task()
            return
        if cotangent is None:
            size = 0
        else:
            size = cotangent.nbytes
        while self._tasks and self._bytes + size > _WAITING:
            self._wait_for_oldest_task()
        self._tasks.append((self._thread.submit(task), size))
        self._bytes += size

    def _wait_for_oldest_task(self) -> None:
        """Wait for the task that was given first, and forget it."""
        task, size = self._tasks.popleft()
        self._bytes -= size
        task.result()

    def join(self) -> bool:
        """Wait until all is launched; False where a layer's input was overwritten meanwhile."""
        while self._tasks:
            self._wait_for_oldest_task()
        return all(x._version == version for x, version in self._inputs)


def _prepare(device: torch.device, stream: Any) -> None:
    """Compute without a graph and without tangents; autocast is off in a new thread."""
    torch.set_grad_enabled(False)
    _set_fwd_grad_enabled(False).__enter__()
    if stream is not None:
        torch.cuda.set_stream(stream)
        torch.zeros(1, device=device)  # makes the device's context this thread's


def _get_stream(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.current_stream(device)
    return None


def sets_precision(entries: Sequence[Entry]) -> bool:
    """Whether a layer sets the precision of products for a moment, which all threads share."""
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return False
    return any(isinstance(e.module, nn.Conv2d) and e.input.dtype == torch.float32 for e in entries)
