"""Runs an experiment: does the missing items, saves each of them, then judges and draws.

A run stops between items when its seconds are over, or earlier if the next item would not fit; an
item with checkpoints stops itself. The same command goes on from there.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pullback import PullbackError
from pullback.cli.environment import require_device
from pullback.cli.files import make_folder

from . import parallel, plots
from .check import Check, Conclusion, Outcome, print_outcome
from .environment import environment
from .experiment import Context, Experiment, Item, Paused
from .progress import Estimates, Progress
from .records import Record
from .store import Key, Name, Results, Store, checkpoints, slug
from .tabular import Table


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
    only: Sequence[str] = (),
) -> Outcome:
    """Do the items that are missing under `out`, for at most so many seconds; judge, draw, save.

    With several workers each item with a seed has a process of its own, after the items without
    one. Seconds that are measured there are those of a machine with other work. `only` names
    words; items without any of them in their keys are left for another time.
    """
    checked_device = _check_device(experiment, device)
    console = console or Console(quiet=True)
    if workers > 1:
        parallel.require_registered_name(experiment)  # raises before anything is done
    store = experiment.open_store(quick, make_folder(out))
    chosen_seeds = experiment.choose_seeds(seeds, quick)
    plan = RunPlan(experiment, quick, chosen_seeds, store, checked_device)
    plan.do(console, seconds, workers, only)
    return plan.conclude(console)


def _check_device(experiment: Experiment, device: str | torch.device) -> torch.device:
    """Return the device; raise if the items do not use it, since the record would say they did."""
    checked_device = require_device(device)
    if checked_device.type != "cpu" and not experiment.anywhere:
        raise PullbackError(
            f"{experiment.name} does not run on {str(device)!r}",
            "its items compute on the CPU",
            "Leave out --device",
        )
    return checked_device


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
        _refuse_repeated_keys(experiment.name, [item.key for item in items])
        #: items without a seed, which are done once, and items that are done for each seed
        self.once = [item for item in items if item.once]
        self.each = [item for item in items if not item.once]
        self.names: dict[Name, Item] = {(item.key, None): item for item in self.once}
        for seed in seeds:
            for item in self.each:
                if item.applies(seed):
                    self.names[item.key, seed] = item

    # --- doing -------------------------------------------------------------------------------

    def do(
        self, console: Console, seconds: float | None, workers: int, only: Sequence[str] = ()
    ) -> None:
        """Do the items that are missing, until the time is over."""
        words = self._check_words(only)
        missing = [name for name in self.names if name not in self.store]
        if words:
            missing = [name for name in missing if words.intersection(name[0])]
        if not missing:
            return
        self.experiment.require_data(self.quick)
        deadline = None
        if seconds is not None:
            deadline = time.monotonic() + seconds
        progress = Progress(console, self.experiment.name, len(self.names))
        with checkpoints(self.store) as folder, progress, threads(self.experiment.threads):
            progress.start(len(self.names) - len(missing))
            executor = Executor(self, folder, progress, self._estimate(missing), deadline)
            executor.do(missing, workers)

    def _check_words(self, only: Sequence[str]) -> set[str]:
        """Return the words; raise if one of them is in no item's key."""
        known = set(chain.from_iterable(key for key, _ in self.names))
        if unknown := set(only) - known:
            raise PullbackError(
                f"No item of {self.experiment.name} has the word {', '.join(sorted(unknown))}",
                f"their words are {', '.join(sorted(known))}",
                "Ask for some of these with --only",
            )
        return set(only)

    def _estimate(self, missing: list[Name]) -> Estimates:
        """Return the seconds that items will take, from those that are done."""
        estimates = Estimates(key for key, _ in missing)
        for name in self.names:
            estimates.know(name[0], self._seconds(name))
        return estimates

    def _seconds(self, name: Name) -> float | None:
        """Return the seconds that an item took; None if it is missing or they are not known."""
        if name in self.store:
            return self.store.took(name)
        return None

    # --- concluding --------------------------------------------------------------------------

    def complete(self, seeds: Sequence[int]) -> list[int]:
        """Return those of the seeds for which every item is done."""

        def are_done(keys: list[Key], seed: int | None) -> bool:
            return all((key, seed) in self.store for key in keys)

        if not are_done([item.key for item in self.once], None):
            return []
        complete = []
        for seed in seeds:
            keys = [item.key for item in self.each if item.applies(seed)]
            if are_done(keys, seed):
                complete.append(seed)
        return complete

    def conclude(self, console: Console) -> Outcome:
        """Judge, draw and save the complete seeds; print the outcome and return it."""
        seeds = self.complete(self.seeds)
        beside = self.complete([s for s in self.store.seeds() if s not in self.seeds])
        checks: list[Check] = []
        tables: list[Table] = []
        figures: list[Path] = []
        if seeds:
            results = Results(self.store, seeds, self.quick)
            checks = self._judge(results)
            tables = list(self.experiment.tables(results))
            figures = self._draw(results)
        outcome = Outcome(
            checks=tuple(checks),
            verdict=self._decide(checks),
            finished=sum(name in self.store for name in self.names),
            total=len(self.names),
            seeds=tuple(seeds),
            files=(self.store.path, *figures),
            beside=tuple(beside),
        )
        self.store.summary = self._summarize(outcome, tables, figures)
        self.store.save()
        print_outcome(console, outcome, tables, self.seeds)
        return outcome

    def _judge(self, results: Results) -> list[Check]:
        if not self.experiment.judged:
            return []
        return list(self.experiment.judge(results))

    def _decide(self, checks: Sequence[Check]) -> Conclusion | None:
        """Return the verdict; that of a short version says so, which may leave out claims."""
        if not checks:
            return None
        verdict = self.experiment.verdict(checks)
        if verdict is None or not self.quick:
            return verdict
        return replace(verdict, why=f"in the short version {verdict.why}")

    def _summarize(
        self, outcome: Outcome, tables: Sequence[Table], figures: Sequence[Path]
    ) -> Record:
        """Return the outcome as the results file has it."""
        times = [self._seconds(name) for name in self.names]
        known_times = [spent for spent in times if spent is not None]
        seconds = None
        if known_times:
            seconds = round(sum(known_times), 3)
        verdict = None
        if outcome.verdict is not None:
            verdict = asdict(outcome.verdict)
        return {
            "asked": self.seeds,
            "complete": list(outcome.seeds),
            "beside": list(outcome.beside),
            "items": [outcome.finished, outcome.total],
            "seconds": seconds,
            "device": self._describe_device(),
            "checks": [asdict(check) for check in outcome.checks],
            "verdict": verdict,
            "tables": [table.as_dict() for table in tables],
            "figures": [path.name for path in figures],
        }

    def _describe_device(self) -> str:
        """Return the type of device that the items were computed on, perhaps in another run."""
        devices = {str(e.get("device", "cpu")) for e in self.store.environments} - {"cpu"}
        if not devices or self.device.type != "cpu":
            return str(self.device)
        if devices == {"mps"}:
            return "mps"
        return "cuda"  # environments have the GPU's name

    def _draw(self, results: Results) -> list[Path]:
        """Draw the experiment's figures and return their files."""
        written = []
        for suffix, figure in self.experiment.draw(results).items():
            stem = self.experiment.stem(self.quick)
            if suffix:
                stem = f"{stem}-{suffix}"
            written += plots.save(figure, self.store.path.with_name(stem))
        return written


def _refuse_repeated_keys(experiment: str, keys: Sequence[Key]) -> None:
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise PullbackError(
            f"Items of {experiment} share a name",
            f"{repeated} occur more than once",
            "Give every item a key of its own",
        )


@dataclass
class Executor:
    """Does items of a plan, one after the other or in several processes.

    Attributes:
        plan: whose items are done.
        folder: of their checkpoints.
        progress: what people see.
        estimates: of the seconds that items take.
        deadline: by `time.monotonic()`, or None.
    """

    plan: RunPlan
    folder: Path
    progress: Progress
    estimates: Estimates
    deadline: float | None

    def __post_init__(self) -> None:
        self._environment = environment(self.plan.device)
        self._started = 0

    def do(self, missing: list[Name], workers: int) -> None:
        """Do the items until the time is over: those without a seed first, and one by one.

        They may build on one another, unless they say on which. With several workers the others
        go to processes.
        """
        if workers == 1:
            self.do_in_order(missing)
            return
        in_order = [name for name in missing if self.plan.names[name].keeps_order]
        side_by_side = [name for name in missing if not self.plan.names[name].keeps_order]
        has_time = self.do_in_order(in_order)
        if has_time and side_by_side:
            self.do_in_processes(side_by_side, min(workers, len(side_by_side)))

    def do_in_order(self, names: Sequence[Name]) -> bool:
        """Do one item after the other; return False if the time was over before the last."""
        plan = self.plan
        for name in names:
            if not self._has_time(name):
                return False
            with self.progress.item(name, self.estimates.left()) as watch:
                context = Context(
                    name[1] or 0,
                    plan.device,
                    plan.quick,
                    self.folder / slug(name),
                    Results(plan.store, plan.seeds, plan.quick),
                    self.deadline,
                    watch,
                )
                try:
                    record, seconds = plan.names[name].run(context)
                except Paused:
                    return False
                self._save(name, record, seconds)
        return True

    def do_in_processes(self, names: Sequence[Name], workers: int) -> None:
        """Do items in several processes, until the time is over."""
        waiting = deque(names)
        with parallel.processes(workers, self.plan.experiment.threads) as pool:
            while waiting or pool.names:
                self._fill(pool, waiting)
                if not pool.names:
                    break
                seconds_left = self.estimates.left() / workers
                self.progress.busy(parallel.describe_running(pool.names), seconds_left)
                for name, sent in pool.wait_for_finished():
                    if sent is None:  # paused: its time is over, and so is that of the others
                        waiting.clear()
                    else:
                        self._save(name, *parallel.rebuild_record(sent))

    def _fill(self, pool: Any, waiting: deque[Name]) -> None:
        """Start items in free processes; clear the queue if there is no time for the next.

        An item starts once those that it builds on are done; those behind it may start before it.
        """
        while pool.free:
            name = next((name for name in waiting if self._can_start(name)), None)
            if name is None:
                if not pool.names:
                    waiting.clear()  # nothing is under way that they could wait for
                return
            if not self._has_time(name):
                waiting.clear()
                return
            waiting.remove(name)
            pool.start(self._make_job(name))

    def _can_start(self, name: Name) -> bool:
        """Return True if the items that this one builds on are done."""
        item = self.plan.names[name]
        if item.after is None:
            needed = [one.key for one in self.plan.once]
        else:
            needed = list(item.after)
        return all((key, None) in self.plan.store for key in needed)

    def _make_job(self, name: Name) -> parallel.Job:
        plan = self.plan
        until = None
        if self.deadline is not None:
            until = time.time() + self.deadline - time.monotonic()
        return parallel.Job(
            plan.experiment.name,
            plan.quick,
            plan.store.path.parent,
            name,
            tuple(plan.seeds),
            str(plan.device),
            self.folder / slug(name),
            until,
        )

    def _has_time(self, name: Name) -> bool:
        """Return True if there is time for one more item; the first is always started."""
        self._started += 1
        if self._started == 1 or self.deadline is None:
            return True
        seconds_left = self.deadline - time.monotonic()
        item = self.plan.names[name]
        if item.resumable:
            return seconds_left > 0
        return seconds_left > 0 and self.estimates.of(item.key) <= seconds_left

    def _save(self, name: Name, record: Record, seconds: float) -> None:
        self.plan.store.put(name, record, seconds, self._environment)
        self.estimates.took(name[0], seconds)
        shutil.rmtree(self.folder / slug(name), ignore_errors=True)
        self.progress.said(name, seconds, self.plan.experiment.line(record))


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use so many threads of the CPU inside; None leaves torch's number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
