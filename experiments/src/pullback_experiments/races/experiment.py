"""The experiment: rates for every optimizer, the best over seeds, and shorter runs of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ..framework.check import Check
from ..framework.curves import Chart, finite
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table, count_of
from .checks import GroupedRecords, Lead, series, table
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
        rates: to choose from.
        settings: of its constructor, over those of the table of optimizers.
        fixed: whether the first rate is taken without a search.
        seeds: it runs with these alone, where not with all of the race.
        lengths: shares of the steps for which it runs too, each with its schedule (bracketed
            races).
        pace_of: the entrant whose steps cost as much, which is timed in its place.
    """

    rates: Sequence[float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    fixed: bool = False
    seeds: Sequence[int] | None = None
    lengths: Sequence[float] = ()
    pace_of: str | None = None

    def describe(self) -> Record:
        """Return everything its runs depend on."""
        return {"rates": list(self.rates), **self.settings}


@dataclass(frozen=True, kw_only=True)
class Race(Experiment):
    """Networks that every optimizer trains on the same batches.

    Attributes:
        tasks, quick_tasks: names in `TASKS`.
        entrants, quick_entrants: optimizers by name.
        search, search_seed: the share of the steps, and the seed, with which rates are compared.
        pace_steps: of the run that times a step; its second half counts.
        lengths: shares of the steps for which the best of ours runs too, each with its schedule.
        ours: names of the entrants that claims are about.
        leads: what is claimed, of each task.
        expected_outcomes: which of the claims held in the full runs, task after task; all if empty.
        changes: fields of the tasks that are set otherwise, such as `compiled` and `clip`.
    """

    tasks: Sequence[str]
    quick_tasks: Sequence[str]
    entrants: Mapping[str, Entrant]
    quick_entrants: Mapping[str, Entrant]
    search: float = 1 / 3
    search_seed: int = 100
    pace_steps: int = 160
    lengths: Sequence[float] = (1.0, 0.85, 0.5)
    ours: Sequence[str] = ("kfac-spectral", "kfac-eigenbasis")
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

    def _ours(self, quick: bool) -> list[str]:
        return [name for name in self._entrants(quick) if name in self.ours]

    def _shorter(self, quick: bool) -> list[float]:
        return [share for share in self.lengths if share < 1 and self._ours(quick)]

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "tasks": {name: task.describe() for name, task in self._tasks(quick).items()},
            "search": self.search,
            "lengths": list(self.lengths),
            "search seed": self.search_seed,
            "methods": {n: e.describe() for n, e in self._entrants(quick).items()},
        }

    def require_data(self, quick: bool) -> None:
        for task in self._tasks(quick).values():
            if isinstance(task.batches, ImageData):
                task.batches.load()

    def smoke(self) -> Self:
        few = {n: replace(e, rates=e.rates[:1]) for n, e in self.quick_entrants.items()}
        changes = {"steps": 2, "evaluations": 1, "held_batch": 8, "held_batches": 1}
        changes = {**self.changes, **changes}
        one = self.quick_tasks[:1]
        return replace(self, judged=False, quick_tasks=one, quick_entrants=few, changes=changes)

    def items(self, quick: bool) -> list[Item]:
        out = []
        for task in self._tasks(quick):
            for name in self._entrants(quick):  # first, when nothing else runs yet
                pace = partial(self._measure_pace, task, name)
                out.append(Item(("pace", task, name), pace, once=True))
            for name, entrant in self._entrants(quick).items():
                for number in range(len(entrant.rates)):
                    work = partial(self._try_rate, task, name, number)
                    out.append(Item(_trial(task, name, number), work, once=True))
                out.append(Item((task, name), partial(self._train_at_best, task, [name], 1.0)))
            for share in self._shorter(quick):
                work = partial(self._train_at_best, task, self._ours(quick), share)
                out.append(Item((task, f"ours, {share:g}"), work))
        return out

    def _try_rate(self, task: str, name: str, number: int, context: Context) -> Record:
        """Run one rate, on the seed of searches."""
        rate = self._entrants(context.quick)[name].rates[number]
        context = replace(context, seed=self.search_seed)
        record = self._run(task, name, rate, self.search, context)
        return {"method": name, "lr": rate, "score": finite(record["final"]), "ms": record["ms"]}

    def _measure_pace(self, task: str, name: str, context: Context) -> Record:
        """Return the seconds of a step, of a run that should be alone on its device."""
        what = self._tasks(context.quick)[task]
        entrant = self._entrants(context.quick)[name]
        record = run(
            replace(what, evaluations=2),
            name,
            entrant.rates[0],
            seed=self.search_seed,
            device=context.device,
            steps=min(self.pace_steps, what.steps),
            settings=entrant.settings,
        )
        _, first, last = record["step"]
        _, before, after = record["seconds"]
        return {"method": name, "ms": 1e3 * (after - before) / (last - first)}

    def _train_at_best(
        self, task: str, names: Sequence[str], share: float, context: Context
    ) -> Record:
        """Run the best of these optimizers at the best of its rates."""
        entrants = self._entrants(context.quick)
        trials = []
        for name in names:
            for number in range(len(entrants[name].rates)):
                trials.append(context.finished.once(*_trial(task, name, number)))
        best = min(trials, key=lambda trial: trial["score"])
        return self._run(task, best["method"], best["lr"], share, context)

    def _run(self, task: str, name: str, rate: float, share: float, context: Context) -> Record:
        what = self._tasks(context.quick)[task]
        return run(
            what,
            name,
            rate,
            seed=context.seed,
            device=context.device,
            steps=max(1, math.floor(share * what.steps + 1e-9)),  # no more than the share
            settings=self._entrants(context.quick)[name].settings,
            watch=context.watch,
        )

    def line(self, record: Record) -> str:
        if "lr" not in record:
            return f"{record['method']}, {record['ms']:.1f} ms"
        if "score" in record:
            loss = record["score"]
        else:
            loss = record["final"]
        return f"{record['method']} lr {record['lr']:g}, loss {loss:.4f}, {record['ms']:.1f} ms"

    def _list_shorter_runs(self, quick: bool) -> list[str]:
        """Return the names of runs with fewer steps."""
        return [f"ours, {share:g}" for share in self._shorter(quick)]

    def _group_records(self, results: Results, task: str) -> GroupedRecords:
        names = [*self._entrants(results.quick), *self._list_shorter_runs(results.quick)]
        records = {}
        for name in names:
            if runs := results.of(task, name):
                records[name] = [self._at_pace(run, task, results) for run in runs]
        return records

    def _drawn_records(self, results: Results, task: str) -> GroupedRecords:
        """Return the records of the entrants that figures show."""
        return self._group_records(results, task)

    def _at_pace(self, run: Record, task: str, results: Results) -> Record:
        """Return a run with the seconds that it would have taken alone, where they are known."""
        method = run["method"]
        key = ("pace", task, self._entrants(results.quick)[method].pace_of or method)
        if not results.has(*key):
            return run
        ms = results.once(*key)["ms"]
        return {**run, "ms": ms, "seconds": [1e-3 * ms * step for step in run["step"]]}

    def judge(self, results: Results) -> list[Check]:
        if results.quick:  # sizes at which losses and seconds tell nothing
            return []
        checks = []
        for task, what in self._tasks(False).items():
            records = self._group_records(results, task)
            prefix = f"{what.title}: "
            for lead in self.leads:
                if lead.rival in records:
                    claims = lead.judge_claims(records, self.ours)
                    checks += [(prefix + c, *details) for c, *details in claims]
        expected_outcomes = self.expected_outcomes or [True] * len(checks)
        return [
            Check(*one, recorded=was, of_paper=False)
            for one, was in zip(checks, expected_outcomes, strict=True)
        ]

    def tables(self, results: Results) -> list[Table]:
        tasks = self._tasks(results.quick)
        return [
            table(self._group_records(results, name), task.title) for name, task in tasks.items()
        ]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        from .checks import draw

        tasks = self._tasks(results.quick)
        seeds = count_of(len(results.seeds), "seed")
        races = {task.title: self._drawn_records(results, name) for name, task in tasks.items()}
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


def _trial(task: str, name: str, number: int) -> tuple[str, ...]:
    return ("search", task, name, str(number))
