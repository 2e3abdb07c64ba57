"""Processes that live as long as a test file, and run functions together."""

from __future__ import annotations

import gc
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
_PLACE = [torch.device("cpu")]
#: what is said of a process that does not answer
GONE = "the process is gone"
HANGS = "the process hangs"


def place() -> torch.device:
    """Return where models and batches of tests are."""
    return _PLACE[0]


def round_off() -> float:
    """Return how far equal results may differ where a pseudo-inverse magnifies round-off.

    A GPU adds in another order, alone as well.
    """
    return 1e-10 if place().type == "cpu" else 1e-8


def settle(device: str) -> None:
    """Let models and batches be there from now on, in this process."""
    _PLACE[0] = torch.device(device)


class World:
    """`size` processes; `run` calls a function of a module in the first of them.

    With gloo they may share one CUDA device; with NCCL each needs one of its own.
    """

    def __init__(
        self, size: int, seconds: float = 60.0, device: str = "cpu", backend: str = "gloo"
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if device == "cpu":
            context = mp.get_context("forkserver")  # torch is imported once
            modules = [f"{__package__}.test_{name}" for name in ("exact", "pde", "sharded")]
            context.set_forkserver_preload(
                ["torch._dynamo", "scipy.linalg", "scipy.special", *modules]
            )
        else:
            context = mp.get_context("spawn")  # CUDA does not go with forks
        self.size = size
        self.pipes = []
        self.processes = []
        self.lost = size
        for rank in range(size):
            parent_end, child_end = context.Pipe()
            arguments = (rank, size, port, child_end, seconds, device, backend)
            modules = context.Process(target=_serve, args=arguments)
            modules.daemon = True
            modules.start()
            self.pipes.append(parent_end)
            self.processes.append(modules)

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """Return what every process returned; raise the first error."""
        outcomes = self.outcomes(function, *args, size=size)
        for rank, (value, error) in enumerate(outcomes):
            if error is not None:
                raise AssertionError(f"process {rank}: {error}\n{value}")
        return [value for value, _ in outcomes]

    def errors(
        self, function: Callable[..., Any], *args: Any, size: int | None = None
    ) -> list[Any]:
        """Return every process's error, as text; None where it returned."""
        return [error for _, error in self.outcomes(function, *args, size=size)]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int | None = None,
        patience: float = 120.0,
    ) -> Any:
        """Return pairs of values and errors."""
        pipes = self.pipes[: size or self.size]
        if self.lost < len(pipes):
            return [(None, f"an earlier test lost process {self.lost}")] * len(pipes)
        for pipe in pipes:
            pipe.send((function, args, len(pipes)))
        outcomes = [_receive(pipe, patience) for pipe in pipes]
        for rank, (_, error) in enumerate(outcomes):
            if error in (GONE, HANGS):
                self.lost = min(self.lost, rank)
        return outcomes

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _receive(pipe: Any, patience: float) -> tuple[Any, Any]:
    try:
        if pipe.poll(patience):
            return pipe.recv()
        return (None, HANGS)
    except (EOFError, OSError):
        return None, GONE


def _serve(
    rank: int, size: int, port: int, pipe: Any, seconds: float, device: str, backend: str
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    settle(device)
    if device == "cuda":
        torch.cuda.set_device(0 if backend == "gloo" else rank)
    address = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, address, rank=rank, world_size=size, timeout=limit)
    for n in range(1, size + 1):
        GROUPS[n] = dist.group.WORLD if n == size else dist.new_group(range(n), timeout=limit)
    gc.freeze()  # what was imported is no garbage: to look at it after each test took a third
    gc.set_threshold(20_000)
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
        _destroy_groups_of_tests()


def _destroy_groups_of_tests() -> None:
    """Destroy the groups that a test made: each keeps threads that wake a hundred times a second.

    Optimizers and curvature objects hold such groups in cycles of references, so that these are
    collected first. Those of a device mesh stay: torch hands the same mesh out again.
    """
    gc.collect()
    lasting = set(GROUPS.values())
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in lasting and not group.group_desc.startswith("mesh"):
            dist.destroy_process_group(group)
