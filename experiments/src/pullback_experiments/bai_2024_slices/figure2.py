"""The seven-layer network of the paper: slice SGD beside SGD, over epochs and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F

from ..framework import plots
from ..framework.check import Check
from ..framework.curves import Chart, Series, Style, averages
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from ..learning.data import DataSet, generate_pictures
from ..learning.training import TrainingOptions, fit, tensor_cores
from .checks import TIMED, claims, table
from .law import RATES, law
from .methods import ADAM, FIRST, METHODS, POLAR, SECOND, SGD, SLICED, START, UNITS, SliceMethod
from .networks import DIGITS_WIDTHS, PAPER_WIDTHS, load, mlp

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PAPER = "Bai, Rosenberg and Xu (2024), Generalized Tangent Kernel"


@dataclass(frozen=True, kw_only=True)
class Figure2(Experiment):
    """CIFAR-10 and the paper's network; the quick version is a narrow one on digits.

    Methods with rates to choose from are tried on a seed of their own, with a tenth of the
    training images held out, by the best accuracy on these. Seconds of the full version are steps
    times what one step takes where nothing else runs: runs may share a GPU.

    Attributes:
        expected_outcomes, quick_expected_outcomes: which claims the full and the quick runs met.
        widths, epochs, batch, lr: of the full version.
        searched, search_seed: epochs and seed of a trial.
        quick_epochs: of the quick version.
    """

    expected_outcomes: Sequence[bool]
    quick_expected_outcomes: Sequence[bool]
    widths: Sequence[int] = PAPER_WIDTHS
    epochs: int = 200
    batch: int = 128
    lr: float = 0.01
    searched: int = 15
    search_seed: int = 100
    quick_epochs: int = 24
    paper: str = PAPER
    seeds: Sequence[int] = tuple(range(5))
    quick_seeds: Sequence[int] = (0, 1, 2)

    def config(self, quick: bool) -> dict[str, Any]:
        task = {
            "dataset": "cifar10", "widths": list(self.widths), "epochs": self.epochs,
            "batch": self.batch, "lr": self.lr, "level": 0.5, "searched": self.searched,
        }  # fmt: skip
        if quick:
            task = {
                "dataset": "digits", "widths": list(DIGITS_WIDTHS), "epochs": self.quick_epochs,
                "batch": 32, "lr": 0.1, "level": 0.9, "searched": 0,
            }  # fmt: skip
        return {
            **task,
            "law": list(RATES),
            "precision": "float32, on CUDA with TF32 products and captured steps",
            "methods": {m.name: m.describe() for m in METHODS},
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, quick_epochs=1, quick_seeds=(0,))

    def require_data(self, quick: bool) -> None:
        load(self.config(quick)["dataset"])

    def items(self, quick: bool) -> list[Item]:
        out = [Item(("law",), law, once=True)]
        for m in METHODS:
            if not quick:
                for rate in m.rates:
                    work = partial(self._try_rate, m, rate)
                    out.append(Item(_trial(m, rate), work, once=True, resumable=True))
                out.append(Item(("cost", m.name), partial(self._cost, m), once=True))
            seeds = m.seeds
            if quick:
                seeds = None
            out.append(
                Item((m.name,), partial(self._train_at_best, m), resumable=True, seeds=seeds)
            )
        return out

    def _cost(self, method: SliceMethod, context: Context) -> Record:
        """Return the seconds of a step on noise: the median over epochs of a hundred steps."""
        config = self.config(context.quick)
        noise = generate_pictures(
            (config["widths"][0],), config["widths"][-1], 100 * config["batch"]
        )
        record = self._train(method, 1e-5, noise.to(context.device), 8, context)
        each = [t - s for s, t in pairwise(record["seconds"])]
        return {"seconds of a step": median(each[1:]) / 100}

    def _try_rate(self, method: SliceMethod, rate: float, context: Context) -> Record:
        torch.manual_seed(self.search_seed)
        config = self.config(context.quick)
        data = _held_out(load(config["dataset"], str(context.device)))
        context = replace(context, seed=self.search_seed)
        record = self._train(method, rate, data, self.searched, context)
        return {"rate": rate, "score": max(record["test accuracy"])}

    def _train_at_best(self, method: SliceMethod, context: Context) -> Record:
        config = self.config(context.quick)
        rate = config["lr"]
        if context.quick:
            rate = method.quick or rate
        elif method.rates:
            tried = [context.finished.once(*_trial(method, r)) for r in method.rates]
            rate = max(tried, key=lambda t: t["score"])["rate"]
        images = load(config["dataset"], str(context.device))
        return {"rate": rate, **self._train(method, rate, images, config["epochs"], context)}

    def _train(
        self, method: SliceMethod, rate: float, images: DataSet, epochs: int, context: Context
    ) -> Record:
        config = self.config(context.quick)
        model = mlp(*config["widths"]).to(context.device)
        with tensor_cores(context.device):
            options = TrainingOptions(epochs=epochs, batch=config["batch"], graphed=True)
            return fit(model, method.build(model, rate), images, F.cross_entropy, context, options)

    def line(self, record: Record) -> str:
        if "one step" in record:
            return f"after one step {record['one step']:.0e}"
        if "seconds of a step" in record:
            return f"{1e3 * record['seconds of a step']:.3f} ms for a step"
        if "score" in record:
            return f"accuracy {record['score']:.3f}"
        loss = record["train loss"][-1]
        accuracy = record["test accuracy"][-1]
        return f"lr {record['rate']:g}, loss {loss:.3f}, test accuracy {accuracy:.3f}"

    def _group_records(self, results: Results) -> dict[str, list[Record]]:
        records = {}
        for method in METHODS:
            records[method.name] = [
                _with_time_alone(results, method, r) for r in results.of(method.name)
            ]
        return records

    def judge(self, results: Results) -> list[Check]:
        expected_outcomes = self.expected_outcomes
        if results.quick:
            expected_outcomes = self.quick_expected_outcomes
        level = self.config(results.quick)["level"]
        checks = claims(self._group_records(results), results.once("law"), level, expected_outcomes)
        # seconds of a tiny network are Python's
        return [c for i, c in enumerate(checks) if not (results.quick and i in TIMED)]

    def curves(self, results: Results) -> list[Chart]:
        return training(self._group_records(results))

    def tables(self, results: Results) -> list[Table]:
        return [table(self._group_records(results), self.config(results.quick)["level"])]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        where = "CIFAR-10"
        if results.quick:
            where = "digits"
        title = f"Seven-layer ReLU network on {where}, {len(results.seeds)} seeds: mean ± deviation"
        return {"": draw_curves(self._group_records(results), title)}


def _with_time_alone(results: Results, method: SliceMethod, record: Record) -> Record:
    """Return the record with seconds measured without other runs, where there are any."""
    if not results.has("cost", method.name):
        return record
    cost = results.once("cost", method.name)["seconds of a step"]
    return {**record, "seconds": [cost * step for step in record["step"]]}


def _trial(method: SliceMethod, rate: float) -> tuple[str, ...]:
    return ("search", method.name, f"{rate:g}")


def _held_out(images: DataSet) -> DataSet:
    """Return the data with a tenth of the training images in place of the test set."""
    n = math.ceil(0.9 * len(images.x))
    x = images.x
    y = images.y
    return DataSet(x[:n], y[:n], x[n:], y[n:], images.classes)


ROWS: Mapping[str, tuple[str, ...]] = {
    "the paper's": (SGD, FIRST, SECOND),
    "beside them": (SGD, START, FIRST, UNITS, POLAR),
    "Adam": (SGD, ADAM, SLICED),
}
_PLACES = plots.assign_places((SGD, FIRST, SECOND, UNITS, POLAR, ADAM, SLICED, START))
_STYLES: Mapping[str, Style] = {START: "dashed", UNITS: "dotted", SLICED: "dashed"}
_ALONG = {"epoch": "epochs", "seconds": "seconds of training", "step": "steps"}


def training(records: Mapping[str, Sequence[Record]]) -> list[Chart]:
    """Test accuracy and training loss of each group of methods."""
    titles = {"test accuracy": "Test accuracy", "train loss": "Training loss"}
    charts = []
    for (group, names), (what, title) in product(ROWS.items(), titles.items()):
        chart = Chart(
            f"{title}: {group}",
            title.lower(),
            [_series(name, records[name], what) for name in names],
            x=_ALONG,
            logx=False,
            logy=what == "train loss",
            note="means over seeds ± standard deviation",
        )
        charts.append(chart)
    return charts


def _series(name: str, runs: Sequence[Record], what: str) -> Series | None:
    if not runs:
        return None
    values = [r[what] for r in runs]
    lines = {}
    for key in _ALONG:
        lines[key] = averages([r[key] for r in runs], values)
    return Series(name, lines, _PLACES[name], _STYLES.get(name, "solid"))


def draw_curves(records: Mapping[str, Sequence[Record]], title: str) -> Figure:
    """Draw a row per group of methods: against seconds (Figure 2a) and epochs (Figure 2b)."""
    figure = plots.make_figure(13, 3.1 * len(ROWS) + 0.5, title, dpi=100)
    grid = figure.subplots(len(ROWS), 3, squeeze=False)
    for row, (group, all_names) in zip(grid, ROWS.items(), strict=True):
        names = [n for n in all_names if records[n]]
        names_along = {"seconds": "seconds of training", "epoch": "epoch"}
        for axes, along in zip(row, names_along, strict=False):
            for name in names:
                mean_band(axes, records[name], along, "test accuracy", name)
            plots.format_axes(axes, logx=False, logy=False)
            plots.label(axes, names_along[along], "test accuracy")
        for name in names:
            mean_band(row[2], records[name], "epoch", "train loss", name)
        plots.format_axes(row[2], logx=False)
        plots.label(row[2], "epoch", "training loss")
        plots.label(row[0], title=group)
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def mean_band(axes: Axes, runs: Sequence[Record], along: str, what: str, name: str) -> None:
    """Return mean ± standard deviation at every epoch that all seeds reached."""
    line = averages([r[along] for r in runs], [r[what] for r in runs])
    color = plots.PALETTE[_PLACES[name]]
    axes.plot(line.x, line.y, ls=_STYLES.get(name), color=color, lw=1.7, label=name)
    axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.15, lw=0)
