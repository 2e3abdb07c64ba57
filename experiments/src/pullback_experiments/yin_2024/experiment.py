"""An experiment of the paper: its setting, its methods and its claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Self

from ..framework import plots
from ..framework.check import Check
from ..framework.curves import Chart, over_seeds
from ..framework.experiment import Context, Experiment, Item
from ..framework.store import Results
from ..framework.tabular import Table
from .methods import DescentMethod
from .problems import FitSetting
from .runs import LEVELS, DescentRun, Summary, run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PAPER = "Yin (2024), Natural Gradient Descent with Orthogonal Greedy Approximation"
_ABOUT = (
    "The paper states neither points nor steps. Seconds are CPU time on one thread. The record is "
    "of seeds 0–9."
)


@dataclass(frozen=True, kw_only=True)
class Comparison(Experiment):
    """One figure of the paper: methods side by side on one problem.

    Attributes:
        setting: problem, network and points.
        methods: each with its number of steps.
        groups: methods that share a row of the figure, by title.
        claims: (summaries by method, p, held) ↦ the claims with their numbers.
        expected_outcomes: which of them held over seeds 0–9 when this was written.
        short: places of those that the quick version can tell.
        quick_steps: of every method, at most.
    """

    setting: FitSetting
    methods: Sequence[tuple[DescentMethod, int]]
    groups: Mapping[str, Sequence[str]]
    claims: Callable[[dict[str, Summary], int, Sequence[bool]], list[Check]]
    expected_outcomes: Sequence[bool]
    short: Sequence[int]
    quick_steps: int = LEVELS.early_steps
    paper: str = PAPER
    about: str = _ABOUT
    anywhere: bool = False
    quick_seeds: Sequence[int] = (0, 1)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "problem": self.setting.problem().name,
            "layers": list(self.setting.layers),
            "points": dict(self.setting.points),
            "methods": {
                method.name: {"steps": self._length(steps, quick), "settings": method.describe()}
                for method, steps in self.methods
            },
        }

    def smoke(self) -> Self:
        few = {name: n // 20 for name, n in self.setting.points.items()}
        setting = replace(self.setting, points=few)
        return replace(self, judged=False, quick_seeds=(0,), quick_steps=2, setting=setting)

    def items(self, quick: bool) -> list[Item]:
        return [
            Item((method.name,), partial(self._descend, method, self._length(steps, quick)))
            for method, steps in self.methods
        ]

    def _length(self, steps: int, quick: bool) -> int:
        if quick:
            return min(steps, self.quick_steps)
        return steps

    def _descend(self, method: DescentMethod, steps: int, context: Context) -> dict[str, Any]:
        return run(self.setting, method, context.seed, steps).as_dict()

    def line(self, record: dict[str, Any]) -> str:
        r = DescentRun(**record)
        words = f"{r.steps[-1]} steps, loss {r.loss[-1]:.1e}, error {r.error[-1]:.1e}"
        if r.stuck is None:
            return words
        return f"{words}, stuck"

    def judge(self, results: Results) -> list[Check]:
        """Return the checks; some claims do not hold, as recorded. The quick version judges
        `short`.
        """
        checks = self.claims(
            self._group_records(results), self.setting.size, self.expected_outcomes
        )
        if results.quick:
            return [checks[i] for i in self.short]
        return checks

    def _group_records(self, results: Results) -> dict[str, Summary]:
        return {m.name: Summary(records(results, m.name)) for m, _ in self.methods}

    def draw(self, results: Results) -> dict[str, Figure]:
        return {"": draw(self, results)}

    def curves(self, results: Results) -> list[Chart]:
        return charts(self, results)

    def tables(self, results: Results) -> list[Table]:
        rows = [
            [
                name,
                f"{s.loss:.0e}",
                f"{s.error:.0e}",
                f"{min(s.errors):.0e}",
                f"{max(s.errors):.0e}",
                f"{s.stuck}/{len(s)}",
                f"{1e3 * s.per_step:.0f}",
            ]
            for name, s in self._group_records(results).items()
        ]
        columns = ["method", "loss", "error", "best", "worst", "stuck", "ms/step"]
        return [Table(columns, rows, f"Medians over {len(results.seeds)} seeds")]


def records(results: Results, method: str) -> list[DescentRun]:
    """Return the runs of a method, in the order of the seeds."""
    return [DescentRun(**one) for one in results.of(method)]


_MEASURES = {"loss": "loss", "error": "relative L² error"}
_ALONG = {"steps": "steps", "seconds": "CPU seconds"}


def charts(experiment: Comparison, results: Results) -> list[Chart]:
    """Return a pair of charts for each group."""
    out = []
    for (group, methods), (measure, name) in product(experiment.groups.items(), _MEASURES.items()):
        series = []
        for method in methods:
            style = plots.choose_dashes(method)
            series.append(over_seeds(method, results.of(method), measure, _ALONG, style=style))
        note = "medians and quartiles over seeds"
        out.append(Chart(group, name, series, x=_ALONG, note=note))
    return out


_COLUMNS = (("loss", "steps"), ("loss", "seconds"), ("error", "steps"), ("error", "seconds"))
_NAMES = {"loss": "loss", "error": "relative L² error"}


def draw(experiment: Comparison, results: Results) -> Figure:
    """Draw one row per group of methods."""
    groups = experiment.groups
    layers = "-".join(map(str, experiment.setting.layers))
    problem = experiment.setting.problem().name
    count = len(results.seeds)
    title = f"{problem}, {layers} tanh network, {count} seeds: medians and quartiles"
    figure = plots.make_figure(16, 0.6 + 3.4 * len(groups), title, dpi=110)
    grid = figure.subplots(len(groups), 4, squeeze=False, sharey=False)
    for row, (group, names) in zip(grid, groups.items(), strict=True):
        for axes, (what, along) in zip(row, _COLUMNS, strict=True):
            for name, color in plots.assign_colors(names).items():
                runs = results.of(name)
                xs = [r[along] for r in runs]
                ys = [r[what] for r in runs]
                style = plots.choose_dashes(name)
                spaced = along == "seconds"
                plots.plot_band(axes, xs, ys, color, name, spaced=spaced, ls=style)
            plots.format_axes(axes)
            plots.label(axes, {"seconds": "CPU seconds"}.get(along, along), _NAMES[what])
        plots.label(row[0], title=group)
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure
