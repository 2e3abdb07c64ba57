"""Runs an experiment: what is missing, saved item by item, then judged and drawn.

A run stops between items when its seconds are over, and earlier where the next item would not fit;
an item that keeps checkpoints stops itself. The same command goes on from there.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..._core.errors import PullbackError
from .device import usable
from .environment import environment
from .estimates import Estimates
from .experiment import Context, Experiment, Item, Paused
from .files import folder
from .outcome import Outcome, tell
from .progress import Progress
from .results import Results
from .store import Key, Name, Store, slug
from .workshop import workshop


def run(
    experiment: Experiment,
    quick: bool = False,
    seeds: Sequence[int] | None = None,
    out: Path = Path("results"),
    console: Console | None = None,
    *,
    device: str | torch.device = "cpu",
    seconds: float | None = None,
) -> Outcome:
    """Do what is missing under `out`, for at most so many seconds; judge, draw and save."""
    where, console = usable(device), console or Console(quiet=True)
    store = opened(experiment, quick, folder(out))
    asked = experiment.chosen(seeds, quick)
    work = _Work(experiment, quick, asked, store, where)
    work.do(console, seconds)
    return work.conclude(console)


def opened(experiment: Experiment, quick: bool, out: Path) -> Store:
    """The results under a folder; refused where they are another's."""
    path = out / f"{experiment.stem(quick)}.json"
    about = {k: getattr(experiment, k) for k in ("name", "paper", "figure", "claim", "about")}
    about |= {"quick": quick, "seeds": list(experiment.quick_seeds if quick else experiment.seeds)}
    store = Store(path, experiment.config(quick), about, experiment.open_parts)
    return store


class _Work:
    """The items of one run, each with its seed, in order."""

    def __init__(
        self,
        experiment: Experiment,
        quick: bool,
        seeds: list[int],
        store: Store,
        device: torch.device,
    ) -> None:
        self.experiment, self.quick, self.seeds = experiment, quick, seeds
        self.store, self.device = store, device
        items = list(experiment.items(quick))
        self.once = [i for i in items if i.once]
        self.each = [i for i in items if not i.once]
        self.names: dict[Name, Item] = {(i.key, None): i for i in self.once}
        self.names |= {(i.key, seed): i for seed in seeds for i in self.each}
        if len(self.names) < len(self.once) + len(seeds) * len(self.each):
            keys = [i.key for i in items]
            twice = sorted({k for k in keys if keys.count(k) > 1})
            raise PullbackError(
                f"Items of {experiment.name} share a name",
                f"{twice} occur more than once",
                "Give every item a key of its own",
            )

    # --- doing -------------------------------------------------------------------------------

    def do(self, console: Console, seconds: float | None) -> None:
        """What is missing, until the time is over."""
        missing = [name for name in self.names if name not in self.store]
        if not missing:
            return
        deadline = None if seconds is None else time.monotonic() + seconds
        guess = self._estimates(missing)
        progress = Progress(console, self.experiment.name, len(self.names))
        with workshop(self.store) as place, progress, self._threads():
            here = environment(self.device)
            progress.start(len(self.names) - len(missing))
            for count, name in enumerate(missing):
                item = self.names[name]
                if count and deadline is not None and not self._fits(item, guess, deadline):
                    break
                with progress.item(name, guess.left()) as watch:
                    begun = time.monotonic()
                    context = Context(
                        name[1] or 0, self.device, self.quick, place / slug(name),
                        Results(self.store, self.seeds, self.quick), deadline, watch,
                    )  # fmt: skip
                    try:
                        record = dict(self._worked(item, context))
                    except Paused:
                        break
                    took = time.monotonic() - begun + _before(context.place)
                    self.store.put(name, record, took, here)
                    guess.took(item.key, took)
                    shutil.rmtree(context.place, ignore_errors=True)
                    progress.said(name, took, self.experiment.line(record))

    def _worked(self, item: Item, context: Context) -> Any:
        """The record, from random numbers that depend on the seed alone."""
        begun = time.monotonic()
        try:
            devices = [context.device] if context.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                torch.manual_seed(context.seed)
                return item.work(context)
        except Paused:
            spent = _before(context.folder()) + time.monotonic() - begun
            (context.folder() / "seconds").write_text(f"{spent:.4f}")
            raise

    def _estimates(self, missing: list[Name]) -> Estimates:
        guess = Estimates(key for key, _ in missing)
        for name in self.names:
            guess.know(name[0], self._took(name))
        return guess

    def _fits(self, item: Item, guess: Estimates, deadline: float) -> bool:
        left = deadline - time.monotonic()
        return left > 0 and (item.resumable or guess.of(item.key) <= left)

    def _took(self, name: Name) -> float | None:
        return self.store.took(name) if name in self.store else None

    @contextmanager
    def _threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.experiment.threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    # --- concluding --------------------------------------------------------------------------

    def complete(self) -> list[int]:
        """The seeds for which every item is done."""

        def done(keys: list[Key], seed: int | None) -> bool:
            return all((key, seed) in self.store for key in keys)

        if not done([i.key for i in self.once], None):
            return []
        each = [i.key for i in self.each]
        return [seed for seed in self.seeds if done(each, seed)]

    def conclude(self, console: Console) -> Outcome:
        """Judge, draw and save what is complete; say what is not."""
        seeds, store = self.complete(), self.store
        results = Results(store, seeds, self.quick)
        checks = self.experiment.judge(results) if seeds else []
        verdict = self.experiment.verdict(checks) if checks else None
        tables = self.experiment.tables(results) if seeds else []
        figures = self._figures(results) if seeds else []
        done = sum(name in store for name in self.names)
        known = [t for name in self.names if (t := self._took(name)) is not None]
        store.summary = {
            "asked": self.seeds,
            "complete": seeds,
            "items": [done, len(self.names)],
            "seconds": round(sum(known), 3) if known else None,
            "device": str(self.device),
            "checks": [asdict(check) for check in checks],
            "verdict": None if verdict is None else asdict(verdict),
            "tables": [table.as_dict() for table in tables],
            "figures": [path.name for path in figures],
        }
        store.save()
        found = Outcome(
            tuple(checks), verdict, done, len(self.names), tuple(seeds), (store.path, *figures)
        )
        tell(console, found, tables, self.seeds)
        return found

    def _figures(self, results: Results) -> list[Path]:
        from .plots import save  # matplotlib is slow to import

        written = []
        for part, figure in self.experiment.draw(results).items():
            stem = self.experiment.stem(self.quick) + (f"-{part}" if part else "")
            written += save(figure, self.store.path.with_name(stem))
        return written


def _before(place: Path) -> float:
    """Seconds that a paused item had already taken."""
    try:
        return float((place / "seconds").read_text())
    except (OSError, ValueError):
        return 0.0
