"""A race whose rates are doubled and halved until the best of them is inside its grid."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..framework.curves import finite
from ..framework.experiment import Context, Item, Paused
from ..framework.records import Record
from ..framework.store import Key, Results
from ..framework.tabular import Table
from .checks import GroupedRecords, title
from .experiment import Entrant, Race

#: rate ↦ what a run with it gave, with its final loss as "final"
Train = Callable[[float], Record]


@dataclass(frozen=True)
class BracketLimits:
    """Where a search for a rate ends."""

    #: what a rate is multiplied or divided by: curves of races are flat within a factor of 1.4
    factor: float = 2.0
    #: runs of one search; eight steps of two reach a rate that is wrong by a factor of 50
    most_runs: int = 8


_LIMITS = BracketLimits()


def bracket(train: Train, start: float) -> list[Record]:
    """Return runs at rates of which the best has a worse one above and a worse one below it.

    The rate is doubled while the loss falls; if it does not fall at first, it is halved while it
    falls. Runs come in the order of their rates. The best is at an end of the list only if the
    limit of runs was reached.

    >>> runs = bracket(lambda rate: {"lr": rate, "final": abs(rate - 5)}, 1.0)
    >>> [run["lr"] for run in runs]
    [1.0, 2.0, 4.0, 8.0]
    """
    runs = [train(start), train(_LIMITS.factor * start)]
    while len(runs) < _LIMITS.most_runs and _best(runs) is runs[-1]:
        runs.append(train(_LIMITS.factor * runs[-1]["lr"]))
    while len(runs) < _LIMITS.most_runs and _best(runs) is runs[0]:
        runs.insert(0, train(runs[0]["lr"] / _LIMITS.factor))
    return runs


def _best(runs: list[Record]) -> Record:
    """Return the run with the lowest final loss; one that diverged is the worst."""
    return min(runs, key=lambda run: finite(run["final"]))


@dataclass(frozen=True, kw_only=True)
class BracketedRace(Race):
    """A race in which a search has runs of full length, and the first rate is only its start.

    The search has a seed of the race, whose run at the best rate counts as that seed's. An entrant
    that is fixed is not searched, and may run for fewer steps too.
    """

    search: float = 1.0
    search_seed: int = 0
    ours: Sequence[str] = ("kfac",)
    shorter_seeds: Sequence[int] | None = (0, 1, 2)

    def items(self, quick: bool) -> list[Item]:
        items = []
        for task in self._tasks(quick):
            for name in self._timed(quick):  # first, when nothing else runs yet
                pace = partial(self._measure_pace, task, name)
                items.append(Item(("pace", task, name), pace, once=True))
            for name, entrant in self._entrants(quick).items():
                if not entrant.fixed:
                    items.append(self._search_item(task, name))
                items.append(self._seed_item(task, name, entrant))
                for share in entrant.lengths:
                    work = partial(self._train_fixed, task, name, share)
                    key = (task, f"{name}, {share:g}")
                    items.append(Item(key, work, seeds=self._find_shorter_seeds(entrant), after=()))
        return items

    def _find_shorter_seeds(self, entrant: Entrant) -> Sequence[int] | None:
        """Return the seeds of an entrant's shorter runs: those that both it and these have."""
        if entrant.seeds is None or self.shorter_seeds is None:
            return entrant.seeds or self.shorter_seeds
        return [seed for seed in self.shorter_seeds if seed in entrant.seeds]

    def _list_shorter_runs(self, quick: bool) -> list[str]:
        entrants = self._entrants(quick).items()
        return [f"{name}, {share:g}" for name, entrant in entrants for share in entrant.lengths]

    def config(self, quick: bool) -> dict[str, Any]:
        """Return that of a race, whose lengths are not those of these entrants."""
        config = super().config(quick)
        del config["lengths"]
        return config

    def _timed(self, quick: bool) -> list[str]:
        """Return the entrants whose pace is measured."""
        return [name for name, entrant in self._entrants(quick).items() if entrant.pace_of is None]

    def _search_item(self, task: str, name: str) -> Item:
        work = partial(self._search_rate, task, name)
        return Item(_search_key(task, name), work, once=True, resumable=True, after=())

    def _seed_item(self, task: str, name: str, entrant: Entrant) -> Item:
        if entrant.fixed:
            work = partial(self._train_fixed, task, name, 1.0)
            return Item((task, name), work, seeds=entrant.seeds, after=())
        work = partial(self._train_at_found_rate, task, name)
        after = [_search_key(task, name)]
        return Item((task, name), work, seeds=entrant.seeds, after=after)

    def _search_rate(self, task: str, name: str, context: Context) -> Record:
        """Run every rate of a bracket; a finished run is kept although the time is over."""
        start = self._entrants(context.quick)[name].rates[0]
        context = replace(context, seed=self.search_seed)
        train = partial(self._train_once, task, name, context)
        runs = bracket(train, start)
        return {"method": name, "lr": _best(runs)["lr"], "runs": runs}

    def _train_once(self, task: str, name: str, context: Context, rate: float) -> Record:
        """Run the search at one rate, from its checkpoint if there is one."""
        path = context.checkpoint_folder / f"rate-{rate:g}.json"
        if path.exists():
            return json.loads(path.read_text("utf-8"))
        if context.left <= _slowest_run(context.checkpoint_folder):
            raise Paused
        record = self._run(task, name, rate, 1.0, context)
        _write(context.folder() / path.name, record)
        return record

    def _train_fixed(self, task: str, name: str, share: float, context: Context) -> Record:
        """Run at the entrant's own rate."""
        rate = self._entrants(context.quick)[name].rates[0]
        return self._run(task, name, rate, share, context)

    def _train_at_found_rate(self, task: str, name: str, context: Context) -> Record:
        """Run at the best rate; the search's run is used for its seed."""
        search = context.finished.once(*_search_key(task, name))
        if context.seed == self.search_seed:
            return _best(search["runs"])
        return self._run(task, name, search["lr"], 1.0, context)

    def _drawn_records(self, results: Results, task: str) -> GroupedRecords:
        """Return the records without entrants that have only one or two seeds."""
        entrants = self._entrants(results.quick)
        too_few = [n for n, e in entrants.items() if e.seeds is not None and len(e.seeds) < 3]
        records = self._group_records(results, task)
        return {name: runs for name, runs in records.items() if name not in too_few}

    def tables(self, results: Results) -> list[Table]:
        tasks = self._tasks(results.quick)
        return [*super().tables(results), *(self._list_rates(results, name) for name in tasks)]

    def _list_rates(self, results: Results, task: str) -> Table:
        """Return a table of all rates that were searched, with their final losses."""
        rows = []
        for name, entrant in self._entrants(results.quick).items():
            if entrant.fixed:
                continue
            for run in results.once(*_search_key(task, name))["runs"]:
                rows.append([title(name), f"{run['lr']:g}", f"{run['final']:.4f}"])
        heading = f"{self._tasks(results.quick)[task].title}: rates, seed {self.search_seed}"
        return Table(["optimizer", "lr", "held-out loss"], rows, heading)

    def line(self, record: Record) -> str:
        if "runs" not in record:
            return super().line(record)
        tried = [f"{run['lr']:g}: {run['final']:.4f}" for run in record["runs"]]
        return f"{record['method']}, {', '.join(tried)}"


def _search_key(task: str, name: str) -> Key:
    return ("search", task, name)


def _slowest_run(folder: Path) -> float:
    """Return the most seconds that a run of this search took so far; 0 before the first."""
    records = [json.loads(path.read_text("utf-8")) for path in folder.glob("rate-*.json")]
    return max((record["seconds"][-1] for record in records), default=0.0)


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write a record in one piece, so that an interruption leaves none or all of it."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record), "utf-8")
    beside.replace(path)
