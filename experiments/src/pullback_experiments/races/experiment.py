"""The experiment: a rate for every optimizer, runs over seeds, and shorter runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pullback.cli import files

from ..framework.check import Check
from ..framework.curves import Chart
from ..framework.experiment import Context, Experiment, Item, Paused
from ..framework.records import Record
from ..framework.store import Key, Results
from ..framework.tabular import Table, count_of
from .bracket import bracket, find_best
from .checks import GroupedRecords, Lead, name_shorter_run, series, table, title
from .loop import RaceTask, run
from .networks import ImageData
from .tasks import TASKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ALONG = {"step": "steps", "seconds": "seconds of training"}


@dataclass(frozen=True)
class Entrant:
    """An optimizer of a race.

    Attributes:
        rate: of all its runs if it is fixed; otherwise where the search for one starts.
        settings: of its constructor, over those of the table of optimizers.
        fixed: whether it runs at `rate` without a search.
        seeds: it runs with these alone, where not with all of the race.
        shares: of the steps, for which it runs too if it is fixed, each with its own schedule.
        shorter_seeds: of those runs, where not the ones that it has and that the race has for them.
        pace_of: the entrant whose steps cost as much, which is timed in its place.
        is_drawn: whether the figure shows it.
        is_even: whether its steps cost the same all along; otherwise a whole run is timed.
    """

    rate: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    fixed: bool = False
    seeds: Sequence[int] | None = None
    shares: Sequence[float] = ()
    shorter_seeds: Sequence[int] | None = None
    pace_of: str | None = None
    is_drawn: bool = True
    is_even: bool = True

    def describe(self) -> Record:
        """Return everything its runs depend on."""
        return {"rates": [self.rate], **self.settings}


@dataclass(frozen=True, kw_only=True)
class Race(Experiment):
    """Networks that every optimizer trains on the same batches.

    The rate of an entrant that is not fixed is searched by `bracket`, in runs of full length on a
    seed of the race; the run at the best rate is the entrant's run with that seed.

    Attributes:
        tasks, quick_tasks: names in `TASKS`.
        entrants, quick_entrants: optimizers by name.
        search_seed: the seed with which rates are searched.
        shorter_seeds: the seeds of runs with fewer steps, where not all of the race.
        pace_steps: of the run that times a step; its second half counts.
        ours: names of the entrants that claims are about.
        leads: what is claimed, of each task.
        expected_outcomes: which of the claims held in the full runs, task after task; all if empty.
        changes: fields of the tasks that are set otherwise, such as `compiled` and `clip`.
    """

    tasks: Sequence[str]
    quick_tasks: Sequence[str]
    entrants: Mapping[str, Entrant]
    quick_entrants: Mapping[str, Entrant]
    search_seed: int = 0
    shorter_seeds: Sequence[int] | None = (0, 1, 2)
    pace_steps: int = 160
    ours: Sequence[str] = ("kfac",)
    leads: Sequence[Lead] = ()
    expected_outcomes: Sequence[bool] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    paper: str = "Races"
    seeds: Sequence[int] = (0, 1, 2)

    def _tasks(self, quick: bool) -> dict[str, RaceTask]:
        names = self.tasks
        if quick:
            names = self.quick_tasks
        return {name: replace(TASKS[name], **self.changes) for name in names}

    def _entrants(self, quick: bool) -> dict[str, Entrant]:
        if quick:
            return dict(self.quick_entrants)
        return dict(self.entrants)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "tasks": {name: task.describe() for name, task in self._tasks(quick).items()},
            "search": 1.0,  # the share of the steps with which rates are compared
            "search seed": self.search_seed,
            "methods": {n: e.describe() for n, e in self._entrants(quick).items()},
        }

    def require_data(self, quick: bool) -> None:
        for task in self._tasks(quick).values():
            if isinstance(task.batches, ImageData):
                task.batches.load()

    def smoke(self) -> Self:
        changes = {"steps": 2, "evaluations": 1, "held_batch": 8, "held_batches": 1}
        changes = {**self.changes, **changes}
        return replace(self, judged=False, quick_tasks=self.quick_tasks[:1], changes=changes)

    # --- what there is to do ----------------------------------------------------------------------

    def items(self, quick: bool) -> list[Item]:
        items = []
        for task in self._tasks(quick):
            items += self._make_pace_items(task, quick)  # first, when nothing else runs yet
            for name, entrant in self._entrants(quick).items():
                if entrant.fixed:
                    items += self._make_fixed_items(task, name, entrant)
                else:
                    items += self._make_searched_items(task, name, entrant)
        return items

    def _make_pace_items(self, task: str, quick: bool) -> list[Item]:
        """Return the timings of all entrants but those that have the pace of another."""
        items = []
        for name, entrant in self._entrants(quick).items():
            if entrant.pace_of is None:
                work = partial(self._measure_pace, task, name)
                items.append(Item(_pace_key(task, name), work, once=True))
        return items

    def _make_fixed_items(self, task: str, name: str, entrant: Entrant) -> list[Item]:
        """Return the runs of an entrant without a search: of full length, then the shorter ones."""
        work = partial(self._train_at_fixed_rate, task, name, 1.0)
        items = [Item((task, name), work, seeds=entrant.seeds, after=())]
        seeds = self._find_shorter_seeds(entrant)
        for share in entrant.shares:
            work = partial(self._train_at_fixed_rate, task, name, share)
            items.append(Item((task, name_shorter_run(name, share)), work, seeds=seeds, after=()))
        return items

    def _find_shorter_seeds(self, entrant: Entrant) -> Sequence[int] | None:
        """Return the seeds of an entrant's shorter runs: those that both it and these have."""
        if entrant.shorter_seeds is not None:
            return entrant.shorter_seeds
        if entrant.seeds is None or self.shorter_seeds is None:
            return entrant.seeds or self.shorter_seeds
        return [seed for seed in self.shorter_seeds if seed in entrant.seeds]

    def _make_searched_items(self, task: str, name: str, entrant: Entrant) -> list[Item]:
        """Return the search for an entrant's rate, and the runs at the best one."""
        key = _search_key(task, name)
        work = partial(self._search_rate, task, name)
        search = Item(key, work, once=True, resumable=True, after=())
        work = partial(self._train_at_best_rate, task, name)
        return [search, Item((task, name), work, seeds=entrant.seeds, after=[key])]

    # --- doing it ---------------------------------------------------------------------------------

    def _measure_pace(self, task: str, name: str, context: Context) -> Record:
        """Return the milliseconds of a step, of a run that should be alone on its device."""
        race_task = self._tasks(context.quick)[task]
        entrant = self._entrants(context.quick)[name]
        time_run = partial(
            run,
            replace(race_task, evaluations=2),
            name,
            entrant.rate,
            seed=self.search_seed,
            device=context.device,
            settings=entrant.settings,
        )
        record = time_run(steps=min(self.pace_steps, race_task.steps))
        if not entrant.is_even:  # what a process does once has been done
            least_share = min(entrant.shares, default=1.0)
            return {"method": name, "ms": time_run(steps=race_task.count_steps(least_share))["ms"]}
        _, first, last = record["step"]
        _, before, after = record["seconds"]
        return {"method": name, "ms": 1e3 * (after - before) / (last - first)}

    def _train_at_fixed_rate(self, task: str, name: str, share: float, context: Context) -> Record:
        """Train for a share of the steps at the rate that the entrant was given."""
        rate = self._entrants(context.quick)[name].rate
        return self._run(task, name, rate, share, context)

    def _search_rate(self, task: str, name: str, context: Context) -> Record:
        """Return the runs of a bracket, and the rate of the best one."""
        start = self._entrants(context.quick)[name].rate
        context = replace(context, seed=self.search_seed)
        runs = bracket(partial(self._load_or_train, task, name, context), start)
        return {"method": name, "lr": find_best(runs)["lr"], "runs": runs}

    def _load_or_train(self, task: str, name: str, context: Context, rate: float) -> Record:
        """Return the search's run at one rate: from its checkpoint, or trained now and saved.

        Raise `Paused` if the time that is left may not suffice for it.
        """
        path = context.checkpoint_folder / f"rate-{rate:g}.json"
        if path.exists():
            return json.loads(path.read_text("utf-8"))
        if context.left <= _find_longest_seconds(context.checkpoint_folder):
            raise Paused
        record = self._run(task, name, rate, 1.0, context)
        files.write_text(path, json.dumps(record))
        return record

    def _train_at_best_rate(self, task: str, name: str, context: Context) -> Record:
        """Train at the best rate of the search; with the search's seed, return its run."""
        search = context.finished.once(*_search_key(task, name))
        if context.seed == self.search_seed:
            return find_best(search["runs"])
        return self._run(task, name, search["lr"], 1.0, context)

    def _run(self, task: str, name: str, rate: float, share: float, context: Context) -> Record:
        race_task = self._tasks(context.quick)[task]
        return run(
            race_task,
            name,
            rate,
            seed=context.seed,
            device=context.device,
            steps=race_task.count_steps(share),
            settings=self._entrants(context.quick)[name].settings,
            watch=context.watch,
        )

    def line(self, record: Record) -> str:
        method = record["method"]
        if "runs" in record:  # of a search
            tried = [f"{run['lr']:g}: {run['final']:.4f}" for run in record["runs"]]
            return f"{method}, {', '.join(tried)}"
        pace = f"{record['ms']:.1f} ms"
        if "lr" in record:
            return f"{method} lr {record['lr']:g}, loss {record['final']:.4f}, {pace}"
        return f"{method}, {pace}"

    # --- what the results say ---------------------------------------------------------------------

    def _group_records(self, results: Results, task: str) -> GroupedRecords:
        """Return the records by entrant, then those of shorter runs; missing ones are left out."""
        entrants = self._entrants(results.quick)
        names = list(entrants)
        for name, entrant in entrants.items():
            names += [name_shorter_run(name, share) for share in entrant.shares]
        records = {}
        for name in names:
            if runs := results.of(task, name):
                records[name] = [self._retime(record, task, results) for record in runs]
        return records

    def _drawn_records(self, results: Results, task: str) -> GroupedRecords:
        """Return the records without entrants that are not drawn or have one or two seeds."""
        left_out = set()
        for name, entrant in self._entrants(results.quick).items():
            if not entrant.is_drawn or (entrant.seeds is not None and len(entrant.seeds) < 3):
                left_out.add(name)
        records = self._group_records(results, task)
        return {
            name: runs for name, runs in records.items() if name.partition(", ")[0] not in left_out
        }

    def _retime(self, record: Record, task: str, results: Results) -> Record:
        """Return a run with the seconds that it would have taken alone, where they are known."""
        method = record["method"]
        key = _pace_key(task, self._entrants(results.quick)[method].pace_of or method)
        if not results.has(*key):
            return record
        ms = results.once(*key)["ms"]
        return {**record, "ms": ms, "seconds": [1e-3 * ms * step for step in record["step"]]}

    def judge(self, results: Results) -> list[Check]:
        if results.quick:  # sizes at which losses and seconds tell nothing
            return []
        checks = []
        for task, race_task in self._tasks(False).items():
            records = self._group_records(results, task)
            prefix = f"{race_task.title}: "
            for lead in self.leads:
                if lead.rival in records:
                    claims = lead.judge_claims(records, self.ours)
                    checks += [(prefix + c, *details) for c, *details in claims]
        expected_outcomes = self.expected_outcomes or [True] * len(checks)
        return [
            Check(*claim, recorded=expected, of_paper=False)
            for claim, expected in zip(checks, expected_outcomes, strict=True)
        ]

    def tables(self, results: Results) -> list[Table]:
        tasks = self._tasks(results.quick)
        ends = [table(self._group_records(results, n), task.title) for n, task in tasks.items()]
        return ends + [self._list_rates(results, name) for name in tasks]

    def _list_rates(self, results: Results, task: str) -> Table:
        """Return a table of all rates that were searched, with their final losses."""
        rows = []
        for name, entrant in self._entrants(results.quick).items():
            if entrant.fixed:
                continue
            for record in results.once(*_search_key(task, name))["runs"]:
                rows.append([title(name), f"{record['lr']:g}", f"{record['final']:.4f}"])
        heading = f"{self._tasks(results.quick)[task].title}: rates, seed {self.search_seed}"
        return Table(["optimizer", "lr", "held-out loss"], rows, heading)

    def draw(self, results: Results) -> Mapping[str, Figure]:
        from .checks import draw

        tasks = self._tasks(results.quick)
        races = {task.title: self._drawn_records(results, name) for name, task in tasks.items()}
        seeds = _describe_seeds(list(races.values()))
        return {"": draw(races, f"Held-out loss, medians and quartiles over {seeds}")}

    def curves(self, results: Results) -> list[Chart]:
        return [
            Chart(
                f"{task.title}: held-out loss",
                "held-out loss",
                series(self._drawn_records(results, name), _ALONG),
                x=_ALONG,
                logx=False,
                logy=False,
                note="medians and quartiles over seeds",
            )
            for name, task in self._tasks(results.quick).items()
        ]


def _describe_seeds(races: Sequence[GroupedRecords]) -> str:
    """Return how many seeds the optimizers have: "3 seeds", or "3 to 5 seeds".

    >>> _describe_seeds([{"kfac": [{}, {}, {}, {}, {}], "soap": [{}, {}, {}]}])
    '3 to 5 seeds'
    """
    counts = [0]
    for records in races:
        counts += [len(runs) for runs in records.values()]
    fewest = min(filter(None, counts), default=0)
    most = max(counts)
    if fewest == most:
        return count_of(most, "seed")
    return f"{fewest} to {count_of(most, 'seed')}"


def _pace_key(task: str, name: str) -> Key:
    return ("pace", task, name)


def _search_key(task: str, name: str) -> Key:
    return ("search", task, name)


def _find_longest_seconds(folder: Path) -> float:
    """Return the most seconds that a run of this search took so far; 0 before the first."""
    records = [json.loads(path.read_text("utf-8")) for path in folder.glob("rate-*.json")]
    return max((record["seconds"][-1] for record in records), default=0.0)
