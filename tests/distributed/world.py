"""Processes that live as long as a test file, and run functions together."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: by size, the group of the first processes
GROUPS: dict[int, Any] = {}


class World:
    """`size` processes with gloo; `run` calls a function of a module in the first of them."""

    def __init__(self, size: int, seconds: float = 60.0) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("forkserver")  # torch is imported once
        context.set_forkserver_preload([
            "pullback", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp",
            "torch.distributed.checkpoint.state_dict", __name__,
        ])  # fmt: skip
        self.size, self.pipes, self.processes = size, [], []
        for rank in range(size):
            here, there = context.Pipe()
            own = context.Process(target=_serve, args=(rank, size, port, there, seconds))
            own.daemon = True
            own.start()
            self.pipes.append(here)
            self.processes.append(own)

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """Return what every process returned; raise the first error."""
        found = self.outcomes(function, *args, size=size)
        for rank, (value, error) in enumerate(found):
            if error is not None:
                raise AssertionError(f"process {rank}: {error}\n{value}")
        return [value for value, _ in found]

    def errors(
        self, function: Callable[..., Any], *args: Any, size: int | None = None
    ) -> list[Any]:
        """Return every process's error, as text; None where it returned."""
        return [error for _, error in self.outcomes(function, *args, size=size)]

    def outcomes(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> Any:
        """Return pairs of values and errors."""
        some = self.pipes[: size or self.size]
        for pipe in some:
            pipe.send((function, args, len(some)))
        return [_received(pipe) for pipe in some]

    def close(self) -> None:
        for own in self.processes:
            own.kill()
            own.join()


def _received(pipe: Any) -> tuple[Any, Any]:
    try:
        return pipe.recv() if pipe.poll(120.0) else (None, "the process hangs")
    except (EOFError, OSError):
        return None, "the process is gone"


def _serve(rank: int, size: int, port: int, pipe: Any, seconds: float) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    address, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=seconds)
    dist.init_process_group("gloo", address, rank=rank, world_size=size, timeout=limit)
    for n in range(1, size + 1):
        GROUPS[n] = dist.group.WORLD if n == size else dist.new_group(range(n), timeout=limit)
    while True:
        try:
            function, args, n = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((function(rank, n, *args), None))
        except BaseException as error:
            pipe.send((traceback.format_exc(), f"{type(error).__name__}: {error}"))
