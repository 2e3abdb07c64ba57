"""A run at work: items one after the other, or in several processes, until the time is over."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pullback.cli.environment import environment

from . import parallel
from .estimates import Estimates
from .experiment import Context, Paused
from .plain import Record
from .progress import Progress
from .results import Results
from .store import Name, slug
from .working import worked

if TYPE_CHECKING:
    from .runner import Work


@dataclass
class Doing:
    """A run at work.

    Attributes:
        work: whose items are done.
        place: folder of their checkpoints.
        progress, guess: for people.
        deadline: by `time.monotonic()`, or None.
    """

    work: Work
    place: Path
    progress: Progress
    guess: Estimates
    deadline: float | None

    def __post_init__(self) -> None:
        self._here = environment(self.work.device)
        self._begun = 0

    def alone(self, names: Sequence[Name]) -> bool:
        """One after the other; whether the time sufficed."""
        work = self.work
        for name in names:
            if not self._fits(name):
                return False
            with self.progress.item(name, self.guess.left()) as watch:
                done = Results(work.store, work.seeds, work.quick)
                context = Context(
                    name[1] or 0, work.device, work.quick, self.place / slug(name), done,
                    self.deadline, watch,
                )  # fmt: skip
                try:
                    record, took = worked(work.names[name], context)
                except Paused:
                    return False
                self._keep(name, record, took)
        return True

    def together(self, names: Sequence[Name], workers: int) -> None:
        """In several processes."""
        work, left = self.work, deque(names)
        with parallel.processes(workers, work.experiment.threads) as pool:
            while left or pool.names:
                while left and pool.free:
                    if not self._fits(left[0]):
                        left.clear()
                        break
                    pool.start(self._job(left.popleft()))
                if not pool.names:
                    break
                self.progress.busy(parallel.waiting(pool.names), self.guess.left() / workers)
                for name, sent in pool.finished():
                    if sent is None:  # paused: its time is over, and so is that of the others
                        left.clear()
                    else:
                        self._keep(name, *parallel.received(sent))

    def _job(self, name: Name) -> parallel.Job:
        work = self.work
        until = None if self.deadline is None else time.time() + self.deadline - time.monotonic()
        return parallel.Job(
            work.experiment.name, work.quick, work.store.path.parent, name, tuple(work.seeds),
            str(work.device), self.place / slug(name), until,
        )  # fmt: skip

    def _fits(self, name: Name) -> bool:
        """Whether there is time for one more; the first always begins, so that a run gets on."""
        self._begun += 1
        if self._begun == 1 or self.deadline is None:
            return True
        left, item = self.deadline - time.monotonic(), self.work.names[name]
        return left > 0 and (item.resumable or self.guess.of(item.key) <= left)

    def _keep(self, name: Name, record: Record, took: float) -> None:
        self.work.store.put(name, record, took, self._here)
        self.guess.took(name[0], took)
        shutil.rmtree(self.place / slug(name), ignore_errors=True)
        self.progress.said(name, took, self.work.experiment.line(record))
