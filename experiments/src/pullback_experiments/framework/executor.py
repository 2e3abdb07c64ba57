"""Runs an experiment: what is missing, saved item by item, then judged and drawn.

A run stops between items when its seconds are over, and earlier where the next item would not fit;
an item that keeps checkpoints stops itself. The same command goes on from there.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from pullback import PullbackError
from pullback.cli.environment import require_device
from pullback.cli.files import make_folder

from . import parallel, plots
from .check import Outcome, tell
from .environment import environment
from .experiment import Context, Experiment, Item, Paused
from .progress import Estimates, Progress
from .records import Record
from .store import Key, Name, Results, Store, checkpoints, slug


def run(
    experiment: Experiment,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    out: Path = Path("results"),
    console: Console | None = None,
    *,
    device: str | torch.device = "cpu",
    seconds: float | None = None,
    workers: int = 1,
) -> Outcome:
    """Do what is missing under `out`, for at most so many seconds; judge, draw and save.

    With several workers items are done in processes of their own, after those done once; seconds
    that are measured there are of a machine that others use too.
    """
    where = _where(experiment, device)
    console = console or Console(quiet=True)
    if workers > 1:
        parallel.named(experiment)  # before anything is done
    store = experiment.opened(quick, make_folder(out))
    asked = experiment.chosen(seeds, quick)
    plan = RunPlan(experiment, quick, asked, store, where)
    plan.do(console, seconds, workers)
    return plan.conclude(console)


def _where(experiment: Experiment, device: str | torch.device) -> torch.device:
    """The device; refused where the items would not use it and the record would say they did."""
    where = require_device(device)
    if where.type != "cpu" and not experiment.anywhere:
        raise PullbackError(
            f"{experiment.name} does not run on {str(device)!r}",
            "its items compute on the CPU",
            "Leave out --device",
        )
    return where


class RunPlan:
    """The items of one run, each with its seed, in order."""

    def __init__(
        self,
        experiment: Experiment,
        quick: bool,
        seeds: list[int],
        store: Store,
        device: torch.device,
    ) -> None:
        self.experiment = experiment
        self.quick = quick
        self.seeds = seeds
        self.store = store
        self.device = device
        items = list(experiment.items(quick))
        self.once = [i for i in items if i.once]
        self.each = [i for i in items if not i.once]
        self.names: dict[Name, Item] = {(i.key, None): i for i in self.once}
        self.names |= {(i.key, s): i for s in seeds for i in self.each if i.applies(s)}
        keys = [i.key for i in items]
        if len(set(keys)) < len(keys):
            twice = sorted({k for k in keys if keys.count(k) > 1})
            raise PullbackError(
                f"Items of {experiment.name} share a name",
                f"{twice} occur more than once",
                "Give every item a key of its own",
            )

    # --- doing -------------------------------------------------------------------------------

    def do(self, console: Console, seconds: float | None, workers: int) -> None:
        """What is missing, until the time is over."""
        missing = [name for name in self.names if name not in self.store]
        if not missing:
            return
        self.experiment.ready(self.quick)
        if seconds is None:
            deadline = None
        else:
            deadline = time.monotonic() + seconds
        progress = Progress(console, self.experiment.name, len(self.names))
        with checkpoints(self.store) as place, progress, threads(self.experiment.threads):
            progress.start(len(self.names) - len(missing))
            executor = Executor(self, place, progress, self._estimates(missing), deadline)
            # items that are done once may build on one another
            if workers == 1:
                alone = missing
            else:
                alone = [name for name in missing if name[1] is None]
            rest = [name for name in missing if name[1] is not None]
            if executor.alone(alone) and workers > 1 and rest:
                executor.together(rest, min(workers, len(rest)))  # all of them start at once

    def _estimates(self, missing: list[Name]) -> Estimates:
        guess = Estimates(key for key, _ in missing)
        for name in self.names:
            guess.know(name[0], self._took(name))
        return guess

    def _took(self, name: Name) -> float | None:
        if name in self.store:
            return self.store.took(name)
        return None

    # --- concluding --------------------------------------------------------------------------

    def complete(self, seeds: Sequence[int]) -> list[int]:
        """Those for which every item is done."""

        def done(keys: list[Key], seed: int | None) -> bool:
            return all((key, seed) in self.store for key in keys)

        if not done([i.key for i in self.once], None):
            return []
        return [s for s in seeds if done([i.key for i in self.each if i.applies(s)], s)]

    def conclude(self, console: Console) -> Outcome:
        """Judge, draw and save what is complete; say what is not."""
        store = self.store
        seeds = self.complete(self.seeds)
        beside = self.complete([s for s in store.seeds() if s not in self.seeds])
        results = Results(store, seeds, self.quick)
        if seeds and self.experiment.judged:
            checks = self.experiment.judge(results)
        else:
            checks = []
        if checks:
            verdict = self.experiment.verdict(checks)
        else:
            verdict = None
        if verdict is not None and self.quick:  # which may leave out claims, seeds and sizes
            verdict = replace(verdict, why=f"in the short version {verdict.why}")
        if seeds:
            tables = self.experiment.tables(results)
        else:
            tables = []
        if seeds:
            figures = self._figures(results)
        else:
            figures = []
        done = sum(name in store for name in self.names)
        known = [t for name in self.names if (t := self._took(name)) is not None]
        store.summary = {
            "asked": self.seeds,
            "complete": seeds,
            "beside": beside,
            "items": [done, len(self.names)],
            "seconds": round(sum(known), 3) if known else None,
            "device": self._computed(),
            "checks": [asdict(check) for check in checks],
            "verdict": None if verdict is None else asdict(verdict),
            "tables": [table.as_dict() for table in tables],
            "figures": [path.name for path in figures],
        }
        store.save()
        found = Outcome(
            tuple(checks), verdict, done, len(self.names), tuple(seeds), (store.path, *figures),
            tuple(beside),
        )  # fmt: skip
        tell(console, found, tables, self.seeds)
        return found

    def _computed(self) -> str:
        """The kind of device that the items were computed on, perhaps in another run."""
        kinds = {str(e.get("device", "cpu")) for e in self.store.environments} - {"cpu"}
        if not kinds or self.device.type != "cpu":
            return str(self.device)
        return "mps" if kinds == {"mps"} else "cuda"  # whose environments have the GPU's name

    def _figures(self, results: Results) -> list[Path]:
        written = []
        for part, figure in self.experiment.draw(results).items():
            stem = self.experiment.stem(self.quick) + (f"-{part}" if part else "")
            written += plots.save(figure, self.store.path.with_name(stem))
        return written


@dataclass
class Executor:
    """A run at plan.

    Attributes:
        plan: whose items are done.
        place: folder of their checkpoints.
        progress, guess: for people.
        deadline: by `time.monotonic()`, or None.
    """

    plan: RunPlan
    place: Path
    progress: Progress
    guess: Estimates
    deadline: float | None

    def __post_init__(self) -> None:
        self._here = environment(self.plan.device)
        self._begun = 0

    def alone(self, names: Sequence[Name]) -> bool:
        """One after the other; whether the time sufficed."""
        plan = self.plan
        for name in names:
            if not self._fits(name):
                return False
            with self.progress.item(name, self.guess.left()) as watch:
                done = Results(plan.store, plan.seeds, plan.quick)
                context = Context(
                    name[1] or 0, plan.device, plan.quick, self.place / slug(name), done,
                    self.deadline, watch,
                )  # fmt: skip
                try:
                    record, took = plan.names[name].run(context)
                except Paused:
                    return False
                self._keep(name, record, took)
        return True

    def together(self, names: Sequence[Name], workers: int) -> None:
        """In several processes."""
        plan = self.plan
        left = deque(names)
        with parallel.processes(workers, plan.experiment.threads) as pool:
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
        plan = self.plan
        if self.deadline is None:
            until = None
        else:
            until = time.time() + self.deadline - time.monotonic()
        return parallel.Job(
            plan.experiment.name, plan.quick, plan.store.path.parent, name, tuple(plan.seeds),
            str(plan.device), self.place / slug(name), until,
        )  # fmt: skip

    def _fits(self, name: Name) -> bool:
        """Whether there is time for one more; the first always begins, so that a run gets on."""
        self._begun += 1
        if self._begun == 1 or self.deadline is None:
            return True
        left = self.deadline - time.monotonic()
        item = self.plan.names[name]
        return left > 0 and (item.resumable or self.guess.of(item.key) <= left)

    def _keep(self, name: Name, record: Record, took: float) -> None:
        self.plan.store.put(name, record, took, self._here)
        self.guess.took(name[0], took)
        shutil.rmtree(self.place / slug(name), ignore_errors=True)
        self.progress.said(name, took, self.plan.experiment.line(record))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads of the CPU while it lasts; None for torch's own."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
