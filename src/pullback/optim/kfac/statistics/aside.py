"""Work done beside a backward pass: while the engine launches kernels, Python has nothing to do.

A second thread launches others meanwhile, on the same stream, where each finds its inputs in order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled

_MOST = 2**27  # bytes that wait to be worked on
_LARGE = 2**26  # of one tensor, which does not wait
_C: Any = torch._C


class Aside:
    """Tasks, in their order; whoever needs what they give joins first.

    Off, on a CPU, where nothing is launched, they are done at once.
    """

    def __init__(self) -> None:
        self.on = False
        self._stream: Any = None
        self._waiting, self._bytes, self._pass = 0, 0, -1
        self._error: BaseException | None = None

    def begin(self, like: Tensor, others: Iterable[Tensor]) -> None:
        """Tasks on what is computed in this thread's stream, until `join`.

        All of it is on one device, `like` and `others`, or they are done at once.
        """
        now = _C._current_graph_task_id()
        if now == self._pass:  # another call of the model in the same loss: its errors are ours
            self.join()
        self.drop()
        self._pass, self.on = now, fit(like) and all(t.device == like.device for t in others)
        self._stream = torch.cuda.current_stream(like.device) if like.is_cuda else None

    def do(self, task: Callable[[], Any], like: Tensor | None = None) -> None:
        """In turn; the memory of this tensor, which belongs to our stream, stays while it waits."""
        if not self.on:
            task()
            return
        nbytes, there = (0, False) if like is None else (like.nbytes, self._elsewhere())
        if there or nbytes > _LARGE or self._bytes + nbytes > _MOST:
            self.join()
            self.on = True
            if there or nbytes > _LARGE:
                task()
                return
        self._waiting += 1
        self._bytes += nbytes
        worker = _worker()
        worker.tasks.put(partial(self._done, worker, task))

    def join(self) -> None:
        """Wait until all is done."""
        if self._waiting:
            done = threading.Event()  # of this call alone, which may be interrupted
            _worker().tasks.put(done.set)
            done.wait()
            if self._stream is not None:  # the engine made the caller's stream wait before
                now = torch.cuda.current_stream(self._stream.device)
                if now != self._stream:
                    now.wait_stream(self._stream)
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

    def _elsewhere(self) -> bool:
        """Whether a layer ran on another stream, on which its hook is called."""
        own = self._stream
        if own is None:
            return False
        return _C._cuda_getCurrentRawStream(own.device_index) != own.cuda_stream

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
        _set_fwd_grad_enabled(False).__enter__()
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
_starting = threading.Lock()


def _worker() -> _Worker:
    if not _workers or not _workers[0].is_alive():  # a forked process has no threads
        with _starting:
            if not _workers or not _workers[0].is_alive():
                (new := _Worker()).start()
                _workers[:] = [new]
    return _workers[0]


def fit(like: Tensor) -> bool:
    """Whether it is worth it."""
    return like.is_cuda
