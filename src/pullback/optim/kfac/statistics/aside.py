"""Work done beside a backward pass: while the engine launches kernels, Python has nothing to do.

A second thread launches others meanwhile, on the same stream, where each finds its inputs in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

_MOST = 2**27  # bytes that wait to be worked on
_LARGE = 2**26  # of one tensor, which does not wait


class Aside:
    """Tasks, in their order; whoever needs what they give joins first.

    Off, on a CPU, where nothing is launched, they are done at once.
    """

    def __init__(self) -> None:
        self.on = False
        self._stream: Any = None
        self._waiting, self._bytes = 0, 0
        self._answers: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None

    def begin(self, like: Tensor) -> None:
        """Tasks on what is computed in this thread's stream, until `join`."""
        self.join()
        self.on = fit(like)
        self._stream = torch.cuda.current_stream(like.device) if like.is_cuda else None

    def do(self, task: Callable[[], Any], nbytes: int = 0) -> None:
        """In turn; memory of this size stays as long as it waits."""
        if not self.on:
            task()
            return
        if nbytes > _LARGE or self._bytes + nbytes > _MOST:
            self.join()
            self.on = True
            if nbytes > _LARGE:
                task()
                return
        self._waiting += 1
        self._bytes += nbytes
        worker = _worker()
        worker.tasks.put(partial(self._done, worker, task))

    def join(self) -> None:
        """Wait until all is done."""
        if self._waiting:
            _worker().tasks.put(partial(self._answers.put, None))
            self._answers.get()
        self._waiting, self._bytes, self.on = 0, 0, False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def drop(self) -> None:
        """The same where nobody is interested in what went wrong."""
        try:
            self.join()
        except Exception:  # of a pass whose results are dropped
            return

    def _done(self, worker: _Worker, task: Callable[[], Any]) -> None:
        if self._error is not None:
            return
        try:
            worker.use(self._stream)
            task()
        except BaseException as error:
            self._error = error


class _Worker(threading.Thread):
    """One for all, without gradients and autocast."""

    def __init__(self) -> None:
        super().__init__(name="pullback", daemon=True)
        self.tasks: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._stream: Any = None

    def run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            task = self.tasks.get()
            task()
            del task  # and the tensors that it holds

    def use(self, stream: Any) -> None:
        """The stream on which tasks are done."""
        if stream is not None and stream != self._stream:
            torch.cuda.set_stream(stream)
            torch.zeros(1, device=stream.device)  # which makes the device's context the thread's
            self._stream = stream


_workers: list[_Worker] = []


def _worker() -> _Worker:
    if not _workers or not _workers[0].is_alive():  # a forked process has no threads
        _workers[:] = [_Worker()]
        _workers[0].start()
    return _workers[0]


def fit(like: Tensor) -> bool:
    """Whether it is worth it."""
    return like.is_cuda
