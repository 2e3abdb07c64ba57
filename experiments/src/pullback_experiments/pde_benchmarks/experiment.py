"""The experiment: every problem, solved by every method in the same seconds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from pullback import pde

from ..framework import plots
from ..framework.check import Check
from ..framework.curves import Chart, finite, over_seeds
from ..framework.experiment import Context, Item, Paused
from ..framework.problem_set import ProblemSetExperiment
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table, count_of
from ..problems import setup
from .methods import ADAM, GAUSS_NEWTON, LBFGS, METHODS, QUICK, SLABS, TARGETS, PdeMethod, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_ENDLESS = 10**9  # steps


@dataclass(frozen=True, kw_only=True)
class Benchmarks(ProblemSetExperiment):
    """The set.

    Attributes:
        problems, quick_problems: names of set-ups.
        seconds, quick_seconds: of every run; of every trial of a rate a quarter.
        quick_points: of the quick version, as a share of the set-up's.
        search_seed: on which rates are chosen.
        missed: the problems of which neither claim held in the full runs.
    """

    name: str = "pde-benchmarks"
    paper: str = "Errors that others report"
    figure: str = "benchmark set of PDEs"
    claim: str = (
        "The natural gradient reaches the errors that others report, and in the same "
        "time errors far below those of Adam and L-BFGS"
    )
    about: str = (
        "The same network, points and seconds of steps for all methods of a problem. Targets are "
        "relative L² errors from the literature, of other networks and machines."
    )
    problems: Sequence[str] = tuple(name for name in TARGETS if name not in SLABS)
    quick_problems: Sequence[str] = QUICK
    seconds: float = 120.0
    quick_seconds: float = 7.0
    quick_points: float = 0.4
    search_seed: int = 100
    missed: Sequence[str] = ("fokker-planck",)
    seeds: Sequence[int] = (0,)
    threads: int | None = None

    def config(self, quick: bool) -> dict[str, Any]:
        points = 1.0
        if quick:
            points = self.quick_points
        return {
            "problems": list(self.choose_problems(quick)),
            "seconds": self.choose_seconds(quick),
            "points": points,
            "methods": {m.name: m.describe() for m in METHODS},
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, quick_problems=("ritz",), quick_seconds=0.2)

    def items(self, quick: bool) -> list[Item]:
        out = []
        for problem in self.choose_problems(quick):
            for m in METHODS:
                for rate in m.rates:
                    work = partial(self._try_rate, problem, m, rate)
                    out.append(Item(_trial(problem, m, rate), work, once=True, resumable=True))
                work = partial(self._solve_problem, problem, m)
                out.append(Item((problem, m.name), work, resumable=True))
        return out

    def _try_rate(self, problem: str, method: PdeMethod, rate: float, context: Context) -> Record:
        seconds = self.choose_seconds(context.quick) / 4
        context = replace(context, seed=self.search_seed)
        record = self._run(problem, method.options(rate), seconds, context)
        return {"rate": rate, "loss": record["loss"]}

    def _solve_problem(self, problem: str, method: PdeMethod, context: Context) -> Record:
        seconds = self.choose_seconds(context.quick)
        if not method.rates:
            return self._run(problem, method.options(), seconds, context)
        tried = [context.finished.once(*_trial(problem, method, r)) for r in method.rates]
        finite = [t for t in tried if math.isfinite(t["loss"])] or tried
        rate = min(finite, key=lambda t: t["loss"])["rate"]
        return {"rate": rate, **self._run(problem, method.options(rate), seconds, context)}

    def _run(
        self, problem: str, options: dict[str, Any], seconds: float, context: Context
    ) -> Record:
        tuned_setup = setup(problem)
        options = {**tuned_setup.options, "steps": _ENDLESS, **options}
        if context.quick:
            points = tuned_setup.options["points"]
            if isinstance(points, dict):
                fewer = {name: round(self.quick_points * n) for name, n in points.items()}
            else:
                fewer = round(self.quick_points * points)
            options["points"] = fewer
        return solve_setup(tuned_setup, options, seconds, context)

    def line(self, record: Record) -> str:
        if "error" not in record:
            return f"loss {record['loss']:.1e}"
        return f"error {record['error'][-1]:.1e} after {record['step'][-1]} steps"

    def _group_records(self, results: Results) -> GroupedRecords:
        problems = self.choose_problems(results.quick)
        records = {}
        for problem in problems:
            records[problem] = {m.name: results.of(problem, m.name) for m in METHODS}
        return records

    def judge(self, results: Results) -> list[Check]:
        records = self._group_records(results)
        if results.quick:
            return claims(records, {}, self.missed)
        return claims(records, TARGETS, self.missed)

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for problem, by in self._group_records(results).items():
            ends = [f"{final(by[m.name]):.1e}" for m in METHODS]
            reported = None
            to_reported = None
            if problem in TARGETS:
                reported = f"{TARGETS[problem]:.1e}"
                seconds = find_median_seconds(by[METHODS[0].name], TARGETS[problem])
                if math.isfinite(seconds):
                    to_reported = f"{seconds:.1f}"
            rows.append([problem, *ends, reported, to_reported])
        columns = ["problem", *(title(m.name) for m in METHODS), "reported", "seconds to it"]
        heading = f"Relative L² error after {self.choose_seconds(results.quick):g} s"
        return [Table(columns, rows, f"{heading}, {count_of(len(results.seeds), 'seed')}")]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        return {"": draw(self._group_records(results), TARGETS)}

    def curves(self, results: Results) -> list[Chart]:
        return charts(self._group_records(results), TARGETS)


def _trial(problem: str, method: PdeMethod, rate: float) -> tuple[str, ...]:
    return ("search", problem, method.name, f"{rate:g}")


def solve_setup(
    tuned_setup: pde.Setup, options: dict[str, Any], seconds: float, context: Context
) -> Record:
    """Run for so many seconds of steps, from the checkpoint if there is one."""

    def watch(run: pde.Run, info: Any) -> bool:
        context.watch(min(run.history.spent / seconds, 1.0), f"error {run.error:.1e}")
        return context.due or run.history.spent >= seconds or not math.isfinite(info.loss)

    network = tuned_setup.network(context.seed)
    solution = pde.solve(
        tuned_setup.problem, network, **{**options, "seed": context.seed}, callbacks=[watch],
        checkpoint=context.folder() / "run.pt", device=context.device, progress=False,
    )  # fmt: skip
    history = solution.history
    unfinished = history.spent < seconds and math.isfinite(history.loss[-1])
    if unfinished and "callback" in solution.stopped:
        raise Paused
    count = len(history.error)
    entries = sorted({*range(0, count, max(1, count // 60)), count - 1})
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "step": [history.measured[i] for i in entries],
        "seconds": [history.clock[i] for i in entries],
        "error": [history.error[i] for i in entries],
        "loss": solution.loss,
        "stopped": solution.stopped,
    }


_ALONG = {"seconds": "seconds of steps", "step": "steps"}


def charts(records: GroupedRecords, targets: Mapping[str, float]) -> list[Chart]:
    """Return one chart per set-up."""
    out = []
    for problem, by_method in records.items():
        series = []
        for method, runs in by_method.items():
            style = plots.choose_dashes(method)
            series.append(over_seeds(title(method), runs, "error", _ALONG, style=style))
        note = ""
        if problem in targets:
            note = f"others report {targets[problem]:.1e}"
        out.append(Chart(problem, "relative L² error", series, x=_ALONG, note=note))
    return out


def draw(records: GroupedRecords, targets: Mapping[str, float]) -> Figure:
    """Draw medians and quartiles over seeds; a line marks what others report."""
    columns = min(4, len(records))
    rows = math.ceil(len(records) / columns)
    figure = plots.make_figure(
        1.5 + 3.6 * columns, 0.9 + 3.0 * rows, "Relative L² error against seconds"
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (problem, by) in zip(grid.flat, records.items(), strict=False):
        colors = plots.assign_colors(by)
        for method, runs in by.items():
            xs = [r["seconds"] for r in runs]
            ys = [r["error"] for r in runs]
            style = plots.choose_dashes(method)
            plots.plot_band(axes, xs, ys, colors[method], title(method), spaced=True, ls=style)
        if problem in targets:
            axes.axhline(
                targets[problem], color=plots.INK, lw=0.9, ls=":", label="reported by others"
            )
        plots.format_axes(axes)
        plots.label(axes, "seconds", "error", problem)
    for axes in list(grid.flat)[len(records) :]:
        axes.set_visible(False)
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


#: records, one per seed, by problem and method
GroupedRecords = Mapping[str, Mapping[str, Sequence[Record]]]


def claims(
    records: GroupedRecords, targets: Mapping[str, float], missed: Collection[str] = ()
) -> list[Check]:
    """Return the checks: better than first-order methods, and as good as reported errors."""
    out = [replace(_ahead(records), recorded=not set(missed) & records.keys())]
    for problem, by in records.items():
        if problem in targets:
            check = _accurate(problem, by[GAUSS_NEWTON], targets[problem])
            out.append(replace(check, recorded=problem not in missed))
    return out


def final(records: Sequence[Record]) -> float:
    """Return the median over seeds of the last error, ∞ for a lost run."""
    return median(finite(r["error"][-1]) for r in records)


def find_median_seconds(records: Sequence[Record], target: float) -> float:
    """Return the median over seeds of the seconds to an error, ∞ if it is not reached."""

    def find_time(record: Record) -> float:
        pairs = zip(record["error"], record["seconds"], strict=True)
        return next((t for e, t in pairs if e <= target), math.inf)

    return median(find_time(r) for r in records)


def _ahead(records: GroupedRecords) -> Check:
    ratios = {
        problem: min(final(by[ADAM]), final(by[LBFGS])) / max(final(by[GAUSS_NEWTON]), 1e-300)
        for problem, by in records.items()
    }
    least = min(ratios, key=ratios.__getitem__)
    ahead = 10.0  # times smaller
    count = sum(r >= ahead for r in ratios.values())
    claim = "after the same seconds the natural gradient's error is "
    claim += f"{ahead:g} times below Adam's, L-BFGS's"
    numbers = f"{count} of {len(ratios)} problems; the least is {ratios[least]:.1e} for {least}"
    return Check(claim, count == len(ratios), numbers, of_paper=False)


def _accurate(problem: str, records: Sequence[Record], target: float) -> Check:
    errors = final(records)
    seconds = find_median_seconds(records, target)
    numbers = f"{errors:.1e}"
    if math.isfinite(seconds):
        numbers += f", reached in {seconds:.0f} s"
    return Check(
        f"the natural gradient solves {problem} to {target:.1e}", errors <= target, numbers
    )
