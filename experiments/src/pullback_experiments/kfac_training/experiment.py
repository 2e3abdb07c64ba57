"""The experiment: a grid for every method, then the best of each over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import torch

from pullback import KFAC

from ..framework import plots
from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart, finite, over_seeds
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from ..learning.training import fit, tensor_cores
from .methods import KRONECKER, METHODS, OF_THE_RUN, Settings, TunedMethod
from .tasks import TrainingTask

if TYPE_CHECKING:
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
        seeds = {"search seeds": list(self.search_seeds)}
        return {
            **self.task.describe(),
            **(seeds if self.search_seeds != _SEARCH_SEEDS else {}),
            "epochs": dict(self.quick_epochs if quick else self.epochs),
            "batch": self.quick_batch if quick else self.batch,
            "methods": {m.name: m.describe() for m in self._methods(quick)},
        }

    def _methods(self, quick: bool) -> Sequence[TunedMethod]:
        return self.quick_methods if quick else self.methods

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
            out.append(Item((m.name,), partial(self._chosen, m), resumable=True))
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

    def _chosen(self, method: TunedMethod, context: Context) -> Record:
        def scores(m: TunedMethod) -> list[float]:
            return [context.finished.once(*_trial(m, i))["score"] for i in range(len(m.grid))]

        rivals = [m for m in self._methods(context.quick) if m.name in method.rivals]
        mark = min((s for m in rivals for s in scores(m)), default=math.inf)
        settings = dict(method.best(scores(method), mark))
        return {"settings": settings, **self._train(method, settings, context)}

    def _train(
        self, method: TunedMethod, settings: Settings, context: Context, *, graphed: bool = False
    ) -> Record:
        config = self.config(context.quick)
        model, images = self.task.made(context.quick, context.device)
        optimizer = method.on(model, self.task.likelihood(), context.seed, settings)
        run = {"epochs": config["epochs"][method.name], "batch": config["batch"]}
        run |= {k: settings[k] for k in OF_THE_RUN if k in settings}
        run |= self.task.run(images)
        with (
            optimizer if isinstance(optimizer, KFAC) else nullcontext(),  # which ends its hooks
            tensor_cores(context.device) if self.task.half else nullcontext(),
        ):
            return fit(model, optimizer, images, self.task.loss, context, graphed=graphed, **run)

    def line(self, record: Record) -> str:
        if "score" in record:
            return f"{_told(record['settings'])}, loss {record['score']:.4g}"
        loss = record["train loss"][-1]
        spent = record["seconds"][-1]
        return f"{_told(record['settings'])}, loss {loss:.4g} in {spent:.1f} s"

    def _group_records(self, results: Results) -> GroupedRecords:
        return {m.name: results.of(m.name) for m in self._methods(results.quick)}

    def judge(self, results: Results) -> list[Check]:
        checks = claims(self._group_records(results), self.less, self.fewer)
        # seconds of a tiny network are Python's; and only the full version speaks of the paper
        if results.quick:
            return make_checks(
                checks[: len(self.quick_expected_outcomes)], self.quick_expected_outcomes, ours={0}
            )
        return make_checks(checks, self.expected_outcomes, ours={0, 1} if self.ours else ())

    def tables(self, results: Results) -> list[Table]:
        return [table(self._group_records(results), _told)]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        seeds = f"{len(results.seeds)} seed{'s' if len(results.seeds) > 1 else ''}"
        return {"": draw(self._group_records(results), f"{self.task.title}, {seeds}")}

    def curves(self, results: Results) -> list[Chart]:
        records = self._group_records(results)
        return [
            Chart(
                f"{self.task.title}: {side} loss",
                f"{side} loss",
                [over_seeds(name, runs, f"{key} loss", _ALONG) for name, runs in records.items()],
                x=_ALONG,
                note="medians and quartiles over seeds",
            )
            for side, key in (("training", "train"), ("test", "test"))
        ]


def _trial(method: TunedMethod, number: int) -> tuple[str, ...]:
    return ("search", method.name, str(number))


def _told(settings: Settings) -> str:
    return ", ".join(f"{k} {v:g}" if math.isfinite(v) else k for k, v in settings.items())


#: records, one per seed, by method
GroupedRecords = Mapping[str, Sequence[Record]]


def final(records: Sequence[Record]) -> float:
    """The median over seeds of the last training loss, ∞ where it was lost."""
    return median(finite(r["train loss"][-1]) for r in records)


def first_order(records: GroupedRecords) -> list[str]:
    """The others: SGD, and Adam or AdamW."""
    return [name for name in records if name != KRONECKER]


def mark(records: GroupedRecords) -> float:
    """The best loss that the first-order methods end with."""
    return min(final(records[name]) for name in first_order(records))


def to(records: Sequence[Record], level: float, along: str) -> float:
    """The median over seeds of steps or seconds until a loss is reached, ∞ where it never is."""

    def one(record: Record) -> float:
        pairs = zip(record["train loss"], record[along], strict=True)
        return next((float(at) for loss, at in pairs if loss <= level), math.inf)

    return median(one(r) for r in records)


def claims(records: GroupedRecords, less: float = 1.0, fewer: float = 1.0) -> list[Claim]:
    """So many times fewer steps, and less time."""
    level = mark(records)
    out = []
    rivals = first_order(records)
    for along, share in (("step", fewer), ("seconds", less)):
        ours = to(records[KRONECKER], level, along)
        theirs = min(to(records[name], level, along) for name in rivals)
        what = "fewer steps" if along == "step" else "less time"
        if share == 1:
            what = what
        else:
            what = f"{share:g} times {what}"
        numbers = f"{_said(ours)} and {_said(theirs)} {along.rstrip('s')}s to {level:.4g}"
        claim = f"K-FAC needs {what} to the best loss of {' and '.join(rivals)}"
        out.append((claim, ours < theirs and share * ours <= theirs, numbers))
    return out


def table(records: GroupedRecords, describe: Callable[[Mapping[str, float]], str]) -> Table:
    """Every method with its settings, ends and times."""
    level = mark(records)
    rows = [
        [
            name,
            describe(runs[0]["settings"]),
            f"{final(runs):.4g}",
            f"{median(finite(r['test loss'][-1]) for r in runs):.4g}",
            _said(to(runs, level, "step")),
            _said(to(runs, level, "seconds")),
            f"{1e3 * median(r['seconds'][-1] / max(r['step'][-1], 1) for r in runs):.1f}",
        ]
        for name, runs in records.items()
    ]
    columns = ["method", "settings", "train loss", "test loss"]
    columns += [f"steps to {level:.4g}", "seconds to it", "ms/step"]
    count = len(next(iter(records.values())))
    return Table(columns, rows, f"Medians over {count} seeds", text=2)


def _said(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.3g}"
    return "never"


_PANELS = (
    ("train loss", "seconds"), ("train loss", "step"), ("test loss", "seconds"),
)  # fmt: skip
_WIDE = 20  # below, a logarithmic axis would have no tick
_ABOVE = 3  # times the best loss of the first-order methods
_NAMES = {"seconds": "seconds of training", "step": "steps"}


def draw(records: GroupedRecords, title: str) -> Figure:
    """Medians and quartiles over seeds; a line at the best loss of the first-order methods."""
    figure = plots.new(13, 4.2, f"{title}: medians and quartiles")
    panels = figure.subplots(1, len(_PANELS))
    colors = plots.colors(records)
    for axes, (measure, along) in zip(panels, _PANELS, strict=True):
        for name, runs in records.items():
            xs = [r[along] for r in runs]
            ys = [r[measure] for r in runs]
            plots.band(axes, xs, ys, colors[name], name, spaced=along == "seconds")
        if measure == "train loss":
            axes.axhline(mark(records), color=plots.INK, lw=0.9, ls=":", label="best of the others")
        ends = [v for runs in records.values() for r in runs for v in r[measure] if v > 0]
        logarithmic = max(ends) > _WIDE * min(ends)
        plots.dress(axes, logy=logarithmic)
        if not logarithmic:  # the start is far above what matters
            axes.set_ylim(top=min(axes.get_ylim()[1], _ABOVE * mark(records)))
        plots.label(axes, _NAMES[along], measure.replace("train", "training"))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right", frameon=False)
    return figure
