"""Items in several processes, while this one keeps the results and shows the progress.

A worker process imports the experiment by name, since functions cannot be sent to it. It reads the
results of items that are done once, and sends its record back. Only the first process writes files.
An interruption, or the end of the first process, ends all workers; finished records are kept.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from pullback import PullbackError

from .. import registry
from . import records
from .experiment import Context, Experiment, Paused
from .progress import format_name
from .records import Arrays, Record
from .store import Name, Results, Store

#: a record in two parts and its seconds; None of an item that paused
Sent = tuple[Record, Arrays, float] | None


@dataclass(frozen=True)
class Job:
    """What a worker needs to run one item.

    Attributes:
        experiment, quick, out: which results it is part of.
        name: item and seed.
        seeds: of the run.
        device, checkpoint_folder: as in `Context`.
        until: when the time is over, by `time.time()`, which processes share.
    """

    experiment: str
    quick: bool
    out: Path
    name: Name
    seeds: tuple[int, ...]
    device: str
    checkpoint_folder: Path
    until: float | None


def require_registered_name(experiment: Experiment) -> str:
    """Return the name by which a process finds the experiment; refuse other names."""
    if experiment.name not in registry.names() or registry.find(experiment.name) is not experiment:
        raise PullbackError(
            f"{experiment.name} cannot run in several processes",
            "they find it by its name, and it is not in `registry.FOLDERS`",
            "Use one worker, or add it there",
        )
    return experiment.name


class Workers:
    """Worker processes that run jobs."""

    def __init__(self, workers: int, threads: int | None) -> None:
        share = threads or max(1, (os.cpu_count() or 1) // workers)
        self.workers = workers
        self._pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _initialize_worker, (share,)
        )
        self._running: dict[Future[Sent], Name] = {}

    @property
    def names(self) -> list[Name]:
        """Return the names of the running items."""
        return list(self._running.values())

    @property
    def free(self) -> bool:
        """Return True if a process is idle."""
        return len(self._running) < self.workers

    def start(self, job: Job) -> None:
        """Send a job to a free process."""
        with _deaf():  # the first job starts all of them
            self._running[self._pool.submit(_run_item, job)] = job.name

    def wait_for_finished(self) -> Iterator[tuple[Name, Sent]]:
        """Wait until a job ends; return all that have ended."""
        completed, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in completed:
            name = self._running.pop(future)
            try:
                yield name, future.result()
            except BrokenProcessPool:
                raise PullbackError(
                    "A process ended before its item did",
                    "it was stopped from outside, or memory ran out",
                    "Use fewer --workers; what was finished is kept, and the same command goes on",
                ) from None


@contextmanager
def processes(workers: int, threads: int | None) -> Iterator[Workers]:
    """Start worker processes, which end with the context, busy or not."""
    others = set(multiprocessing.active_children())
    pool = Workers(workers, threads)
    try:
        yield pool
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        raise
    finally:
        pool._pool.shutdown(cancel_futures=True)


@contextmanager
def _deaf() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which a terminal sends to all of them.

    They inherit the blocked signal. This process receives it when the context ends.
    """
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialize_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()
    torch.set_num_threads(threads)


def _follow() -> None:
    """End this worker when the first process ends."""
    if (first := multiprocessing.parent_process()) is not None:
        first.join()
        os._exit(1)


@lru_cache(maxsize=1)
def _open_store(name: str, quick: bool, out: Path) -> tuple[Experiment, Store]:
    from .. import registry

    experiment = registry.find(name)
    return experiment, experiment.open_store(quick, out)


def _run_item(job: Job) -> Sent:
    """Run one item; called in the worker."""
    experiment, store = _open_store(job.experiment, job.quick, job.out)
    store.reread()  # items that it builds on may be newer than this process
    key, seed = job.name
    (item,) = [i for i in experiment.items(job.quick) if i.key == key]
    if job.until is None:
        deadline = None
    else:
        deadline = time.monotonic() + job.until - time.time()
    results = Results(store, job.seeds, job.quick)
    context = Context(
        seed or 0, torch.device(job.device), job.quick, job.checkpoint_folder, results, deadline
    )  # fmt: skip
    try:
        record, took = item.run(context)
    except Paused:
        return None
    return *records.split(record), took


def rebuild_record(sent: tuple[Record, Arrays, float]) -> tuple[Record, float]:
    """Return the record as it was made, and its seconds."""
    content, arrays, took = sent
    return records.join(content, arrays), took


def describe_running(names: Sequence[Name]) -> str:
    """Return a few words on the running items.

    >>> describe_running([(("a", "b"), 0), (("a", "c"), 1)])
    '2 at work: a, b, seed 0; …'
    """
    words = f"{len(names)} at work: {format_name(names[0])}"
    if len(names) > 1:
        return f"{words}; …"
    return words
