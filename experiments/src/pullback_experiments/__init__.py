r"""The papers' figures as runnable experiments, and the demonstration.

An experiment is a subclass of `Experiment` that says what results depend on, what there is to do,
and what the results say. The rest is done for it: items are saved as they finish and never done
twice, results of another configuration are refused, a run goes in slices of a few minutes, figures
are written as PNG and SVG, checks and verdict are kept beside environment, commit, seeds, seconds.

To add one, make a folder `author_year_topic/` here whose `__init__.py` has a tuple
`EXPERIMENTS`, and add a line to `registry.FOLDERS`. A whole experiment:

    @dataclass(frozen=True, kw_only=True)
    class Decay(Experiment):
        rates: Sequence[float] = (0.1, 0.5)

        def config(self, quick):  # JSON; "methods" may gain and lose entries, the rest must agree
            return {"steps": 3 if quick else 30, "methods": {f"lr {r}": r for r in self.rates}}

        def items(self, quick):  # each runs for every seed
            steps = self.config(quick)["steps"]
            return [Item((f"lr {r}",), partial(descend, r, steps)) for r in self.rates]

        def judge(self, results):
            runs = [results.of(f"lr {rate}") for rate in self.rates]  # records, one per seed
            slow, fast = (max(run["loss"][-1] for run in records) for records in runs)
            return [Check("a higher rate is faster", fast < slow, f"{fast:.1e} and {slow:.1e}")]

        def draw(self, results):  # optional; the name is added to the experiment's
            figure = plots.make_figure(6, 4, "Decay")
            axes = figure.subplots()
            for color, r in zip(plots.PALETTE, self.rates):
                runs = results.of(f"lr {r}")
                plots.plot_band(axes, [x["step"] for x in runs], [x["loss"] for x in runs], color)
            plots.format_axes(axes)
            return {"": figure}

        def curves(self, results):  # optional; drawn by the page, which zooms and switches axes
            lines = [over_seeds(f"lr {r}", results.of(f"lr {r}"), "loss", ["step"])
                     for r in self.rates]
            return [Chart("Decay", "loss", lines)]

    def descend(rate, steps, context):  # work: a record of numbers, lists and arrays
        w = torch.randn(5, device=context.device)  # seeded by context.seed already
        ...
        return {"step": [...], "loss": [...], "final": w.numpy()}

    EXPERIMENTS = (Decay(name="smith-2024-decay", paper=…, figure="Figure 1", claim=…),)

Long items take checkpoints: `Item(..., resumable=True)`; write them under `context.folder()`, and
where `context.due` save and `raise Paused`. `training.fit` does that for networks. Items of
`once=True` come before the seeds (a search for settings); `context.finished.once(key)` reads them.
`data.py` has the data sets, `plots` the palette, bands over seeds and axes, `curves` medians of
runs that end early. From Python: `run(Decay(…), quick=True, out=Path("results"))`; with `workers=2`
items are done in two processes, after those of `once=True`.

Every experiment of the registry runs in the tests: give yours a `smoke()` that returns a smaller
one, `replace(self, judged=False, rates=(0.1,))`, where its quick version takes more than seconds.
"""

from typing import TYPE_CHECKING

from pullback._core.lazy import attach

if TYPE_CHECKING:
    from .framework.check import Check, Conclusion, Outcome, make_checks
    from .framework.curves import Chart, Line, Series, over_seeds
    from .framework.executor import run
    from .framework.experiment import Context, Experiment, Item, Paused
    from .framework.progress import seed_range
    from .framework.records import Record
    from .framework.store import Results
    from .framework.tabular import Table
    from .registry import find, names
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "framework.check": "Check Outcome Conclusion make_checks",
            "framework.curves": "Chart Line Series over_seeds",
            "framework.executor": "run",
            "framework.experiment": "Context Experiment Item Paused",
            "framework.progress": "seed_range",
            "framework.records": "Record",
            "framework.store": "Results",
            "framework.tabular": "Table",
            "registry": "find names",
        },
    )

__all__ = [
    "Experiment", "Item", "Context", "Paused", "Record",
    "Results", "Check", "Conclusion", "make_checks", "Table",
    "Chart", "Series", "Line", "over_seeds",
    "run", "Outcome", "find", "names", "seed_range",
]  # fmt: skip
