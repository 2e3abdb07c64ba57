"""The experiment: a grid for every method, then the best of each over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import torch

from ..framework import plots
from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart, finite, over_seeds
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table, count_of
from ..learning.natural import close_kfac
from ..learning.training import TrainingOptions, fit, tensor_cores
from .methods import KRONECKER, METHODS, OF_THE_RUN, Settings, TunedMethod
from .tasks import TrainingTask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PAPER = (
    "Martens and Grosse (2015), Optimizing Neural Networks with Kronecker-factored Approximate "
    "Curvature"
)
_SEARCH_SEEDS = (100, 101)  # rates at the edge diverge for some seeds
_ALONG = {"seconds": "seconds of training", "step": "steps"}


@dataclass(frozen=True, kw_only=True)
class KFACTraining(Experiment):
    """One network, trained by all.

    Attributes:
        task: network, data and loss.
        methods, quick_methods: of the full version and of the quick one.
        epochs, quick_epochs: of every method; where K-FAC has fewer, its rate falls sooner.
        batch, quick_batch: samples of a step.
        search_seeds: of a trial, of which the worst counts.
        fewer, less: how many times fewer steps and less time K-FAC is said to take.
        ours: whether the claims are ours, of a network that is not in the paper.
        expected_outcomes: which of them held in the full runs.
        quick_expected_outcomes: of the quick version, which has the first alone, or none.
    """

    task: TrainingTask
    methods: Sequence[TunedMethod] = METHODS
    quick_methods: Sequence[TunedMethod] = METHODS
    epochs: Mapping[str, int] = field(
        default_factory=lambda: {"SGD": 100, "Adam": 100, "K-FAC": 25}
    )
    quick_epochs: Mapping[str, int] = field(
        default_factory=lambda: {"SGD": 60, "Adam": 60, "K-FAC": 30}
    )
    batch: int = 1000
    quick_batch: int = 128
    search_seeds: Sequence[int] = _SEARCH_SEEDS
    fewer: float = 2.0
    less: float = 1.0
    ours: bool = True
    expected_outcomes: Sequence[bool] = (True, True)
    quick_expected_outcomes: Sequence[bool] = (True,)
    paper: str = PAPER
    seeds: Sequence[int] = (0, 1, 2)

    def config(self, quick: bool) -> dict[str, Any]:
        epochs = self.epochs
        batch = self.batch
        if quick:
            epochs = self.quick_epochs
            batch = self.quick_batch
        search = {}
        if self.search_seeds != _SEARCH_SEEDS:  # records of the usual seeds do not name them
            search = {"search seeds": list(self.search_seeds)}
        return {
            **self.task.describe(),
            **search,
            "epochs": dict(epochs),
            "batch": batch,
            "methods": {m.name: m.describe() for m in self._methods(quick)},
        }

    def _methods(self, quick: bool) -> Sequence[TunedMethod]:
        if quick:
            return self.quick_methods
        return self.methods

    def smoke(self) -> Self:
        once = dict.fromkeys(self.quick_epochs, 1)
        few = [replace(m, grid=m.grid[:1]) for m in self.quick_methods]
        return replace(self, judged=False, quick_methods=few, quick_epochs=once, quick_batch=400)

    def items(self, quick: bool) -> list[Item]:
        out = []
        for m in self._methods(quick):
            for number, settings in enumerate(m.grid):
                work = partial(self._try_settings, m, settings)
                out.append(Item(_trial(m, number), work, once=True, resumable=True))
            out.append(Item((m.name,), partial(self._train_at_best, m), resumable=True))
        return out

    def _try_settings(self, method: TunedMethod, settings: Settings, context: Context) -> Record:
        ends = []
        for seed in self.search_seeds:
            torch.manual_seed(seed)
            folder = context.checkpoint_folder / str(seed)
            trial_context = replace(context, seed=seed, checkpoint_folder=folder)
            record = self._train(method, settings, trial_context, graphed=True)
            ends.append(finite(record["train loss"][-1]))
        return {"settings": dict(settings), "score": max(ends)}

    def _train_at_best(self, method: TunedMethod, context: Context) -> Record:
        def scores(m: TunedMethod) -> list[float]:
            return [context.finished.once(*_trial(m, i))["score"] for i in range(len(m.grid))]

        rivals = [m for m in self._methods(context.quick) if m.name in method.rivals]
        mark = min(chain.from_iterable(map(scores, rivals)), default=math.inf)
        settings = dict(method.best(scores(method), mark))
        return {"settings": settings, **self._train(method, settings, context)}

    def _train(
        self, method: TunedMethod, settings: Settings, context: Context, *, graphed: bool = False
    ) -> Record:
        config = self.config(context.quick)
        model, images = self.task.build_parts(context.quick, context.device)
        optimizer = method.on(model, self.task.likelihood(), context.seed, settings)
        run = {"epochs": config["epochs"][method.name], "batch": config["batch"]}
        run |= {k: settings[k] for k in OF_THE_RUN if k in settings}
        run |= self.task.run(images)
        precision: AbstractContextManager[object] = nullcontext()
        if self.task.half:
            precision = tensor_cores(context.device)
        with close_kfac(optimizer), precision:
            options = TrainingOptions(graphed=graphed, **run)
            return fit(model, optimizer, images, self.task.loss, context, options)

    def line(self, record: Record) -> str:
        if "score" in record:
            return f"{_format_settings(record['settings'])}, loss {record['score']:.4g}"
        loss = record["train loss"][-1]
        spent = record["seconds"][-1]
        return f"{_format_settings(record['settings'])}, loss {loss:.4g} in {spent:.1f} s"

    def _group_records(self, results: Results) -> GroupedRecords:
        return {m.name: results.of(m.name) for m in self._methods(results.quick)}

    def judge(self, results: Results) -> list[Check]:
        checks = claims(self._group_records(results), self.less, self.fewer)
        # seconds of a tiny network are Python's; and only the full version speaks of the paper
        if results.quick:
            return make_checks(
                checks[: len(self.quick_expected_outcomes)], self.quick_expected_outcomes, ours={0}
            )
        ours = set()
        if self.ours:
            ours = {0, 1}
        return make_checks(checks, self.expected_outcomes, ours)

    def tables(self, results: Results) -> list[Table]:
        return [table(self._group_records(results), _format_settings)]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        seeds = count_of(len(results.seeds), "seed")
        return {"": draw(self._group_records(results), f"{self.task.title}, {seeds}")}

    def curves(self, results: Results) -> list[Chart]:
        records = self._group_records(results)
        charts = []
        for side, entry in (("training", "train loss"), ("test", "test loss")):
            series = [over_seeds(name, runs, entry, _ALONG) for name, runs in records.items()]
            title = f"{self.task.title}: {side} loss"
            note = "medians and quartiles over seeds"
            charts.append(Chart(title, f"{side} loss", series, x=_ALONG, note=note))
        return charts


def _trial(method: TunedMethod, number: int) -> tuple[str, ...]:
    return ("search", method.name, str(number))


def _format_settings(settings: Settings) -> str:
    """Return the settings in a line; an infinite one, which is off, by its name alone."""
    words = []
    for name, value in settings.items():
        if math.isfinite(value):
            words.append(f"{name} {value:g}")
        else:
            words.append(name)
    return ", ".join(words)


#: records, one per seed, by method
GroupedRecords = Mapping[str, Sequence[Record]]


def final(records: Sequence[Record]) -> float:
    """Return the median over seeds of the last training loss, ∞ for a lost run."""
    return median(finite(r["train loss"][-1]) for r in records)


def first_order(records: GroupedRecords) -> list[str]:
    """Return the methods other than K-FAC: SGD, and Adam or AdamW."""
    return [name for name in records if name != KRONECKER]


def find_best_rival_loss(records: GroupedRecords) -> float:
    """Return the best loss that the first-order methods end with."""
    return min(final(records[name]) for name in first_order(records))


def find_median_time(records: Sequence[Record], level: float, along: str) -> float:
    """Return the median over seeds of steps or seconds to a loss, ∞ if it is not reached."""

    def find_time(record: Record) -> float:
        pairs = zip(record["train loss"], record[along], strict=True)
        return next((float(at) for loss, at in pairs if loss <= level), math.inf)

    return median(find_time(r) for r in records)


def claims(records: GroupedRecords, less: float = 1.0, fewer: float = 1.0) -> list[Claim]:
    """Return the checks of how many times fewer steps, and less time, K-FAC takes."""
    level = find_best_rival_loss(records)
    out = []
    rivals = first_order(records)
    for along, what, share in (("step", "fewer steps", fewer), ("seconds", "less time", less)):
        ours = find_median_time(records[KRONECKER], level, along)
        theirs = min(find_median_time(records[name], level, along) for name in rivals)
        gain = what
        if share != 1:
            gain = f"{share:g} times {what}"
        numbers = (
            f"{_format_count(ours)} and {_format_count(theirs)} {along.rstrip('s')}s to {level:.4g}"
        )
        claim = f"K-FAC needs {gain} to the best loss of {' and '.join(rivals)}"
        out.append((claim, ours < theirs and share * ours <= theirs, numbers))
    return out


def table(records: GroupedRecords, describe: Callable[[Mapping[str, float]], str]) -> Table:
    """Return every method with its settings, last losses and times."""
    level = find_best_rival_loss(records)
    rows = []
    for name, runs in records.items():
        test_loss = median(finite(r["test loss"][-1]) for r in runs)
        seconds_per_step = median(r["seconds"][-1] / max(r["step"][-1], 1) for r in runs)
        row = [name, describe(runs[0]["settings"]), f"{final(runs):.4g}", f"{test_loss:.4g}"]
        row += [
            _format_count(find_median_time(runs, level, "step")),
            _format_count(find_median_time(runs, level, "seconds")),
        ]
        rows.append([*row, f"{1e3 * seconds_per_step:.1f}"])
    columns = ["method", "settings", "train loss", "test loss"]
    columns += [f"steps to {level:.4g}", "seconds to it", "ms/step"]
    count = len(next(iter(records.values())))
    return Table(columns, rows, f"Medians over {count} seeds", text=2)


def _format_count(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.3g}"
    return "never"


_PANELS = (
    ("train loss", "seconds"), ("train loss", "step"), ("test loss", "seconds"),
)  # fmt: skip
_NAMES = {"seconds": "seconds of training", "step": "steps"}


def draw(records: GroupedRecords, title: str) -> Figure:
    """Draw medians and quartiles over seeds; a line marks the best first-order loss."""
    figure = plots.make_figure(13, 4.2, f"{title}: medians and quartiles")
    panels = figure.subplots(1, len(_PANELS))
    colors = plots.assign_colors(records)
    for axes, (measure, along) in zip(panels, _PANELS, strict=True):
        for name, runs in records.items():
            xs = [r[along] for r in runs]
            ys = [r[measure] for r in runs]
            plots.plot_band(axes, xs, ys, colors[name], name, spaced=along == "seconds")
        if measure == "train loss":
            axes.axhline(
                find_best_rival_loss(records),
                color=plots.INK,
                lw=0.9,
                ls=":",
                label="best of the others",
            )
        _scale_losses(axes, records, measure)
        plots.label(axes, _NAMES[along], measure.replace("train", "training"))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False)
    return figure


def _scale_losses(axes: Axes, records: GroupedRecords, measure: str) -> None:
    """Choose a logarithmic axis for losses of a wide range, and otherwise show the end of runs."""
    losses: list[float] = []
    for run in chain.from_iterable(records.values()):
        losses += [loss for loss in run[measure] if loss > 0]
    is_wide = max(losses) > 20 * min(losses)  # below, a logarithmic axis would have no tick
    plots.format_axes(axes, logy=is_wide)
    if not is_wide:  # the start is far above what matters
        axes.set_ylim(top=min(axes.get_ylim()[1], 3 * find_best_rival_loss(records)))
