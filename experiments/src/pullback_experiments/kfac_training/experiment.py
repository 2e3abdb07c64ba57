"""The experiment: a grid for every method, then the best of each over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from pullback import KFAC

from ..framework.check import Check, recorded
from ..framework.curves import Chart, over_seeds
from ..framework.experiment import Context, Experiment, Item
from ..framework.plain import Record
from ..framework.quantiles import finite
from ..framework.results import Results
from ..framework.tabular import Table
from ..learning.precision import tensor_cores
from ..learning.training import fit
from .checks import Found, claims, table
from .grids import METHODS
from .methods import OF_THE_RUN, Method, Settings
from .tasks import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = (
    "Martens and Grosse (2015), Optimizing Neural Networks with Kronecker-factored Approximate "
    "Curvature"
)
_SEARCH_SEEDS = (100, 101)  # rates at the edge diverge for some seeds
_ALONG = {"seconds": "seconds of training", "step": "steps"}


@dataclass(frozen=True, kw_only=True)
class Training(Experiment):
    """One network, trained by all.

    Attributes:
        task: network, data and loss.
        methods, quick_methods: of the full version and of the quick one.
        epochs, quick_epochs: of every method; where K-FAC has fewer, its rate falls sooner.
        batch, quick_batch: samples of a step.
        search_seeds: of a trial, of which the worst counts.
        fewer, less: how many times fewer steps and less time K-FAC is said to take.
        ours: whether the claims are ours, of a network that is not in the paper.
        held: which of them held in the full runs.
        quick_held: of the quick version, which has the first alone, or none.
    """

    task: Task
    methods: Sequence[Method] = METHODS
    quick_methods: Sequence[Method] = METHODS
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
    held: Sequence[bool] = (True, True)
    quick_held: Sequence[bool] = (True,)
    paper: str = PAPER
    seeds: Sequence[int] = (0, 1, 2)

    def config(self, quick: bool) -> dict[str, Any]:
        seeds = {"search seeds": list(self.search_seeds)}
        return {
            **self.task.described(),
            **(seeds if self.search_seeds != _SEARCH_SEEDS else {}),
            "epochs": dict(self.quick_epochs if quick else self.epochs),
            "batch": self.quick_batch if quick else self.batch,
            "methods": {m.name: m.described() for m in self._methods(quick)},
        }

    def _methods(self, quick: bool) -> Sequence[Method]:
        return self.quick_methods if quick else self.methods

    def smoke(self) -> Self:
        once = dict.fromkeys(self.quick_epochs, 1)
        few = [replace(m, grid=m.grid[:1]) for m in self.quick_methods]
        return replace(self, judged=False, quick_methods=few, quick_epochs=once, quick_batch=400)

    def items(self, quick: bool) -> list[Item]:
        out = []
        for m in self._methods(quick):
            for place, some in enumerate(m.grid):
                work = partial(self._tried, m, some)
                out.append(Item(_trial(m, place), work, once=True, resumable=True))
            out.append(Item((m.name,), partial(self._chosen, m), resumable=True))
        return out

    def _tried(self, method: Method, some: Settings, context: Context) -> Record:
        ends = []
        for seed in self.search_seeds:
            torch.manual_seed(seed)
            place = context.place / str(seed)
            own = replace(context, seed=seed, place=place)
            record = self._train(method, some, own, graphed=True)
            ends.append(finite(record["train loss"][-1]))
        return {"settings": dict(some), "score": max(ends)}

    def _chosen(self, method: Method, context: Context) -> Record:
        def scores(m: Method) -> list[float]:
            return [context.done.once(*_trial(m, i))["score"] for i in range(len(m.grid))]

        rivals = [m for m in self._methods(context.quick) if m.name in method.rivals]
        mark = min((s for m in rivals for s in scores(m)), default=math.inf)
        some = dict(method.best(scores(method), mark))
        return {"settings": some, **self._train(method, some, context)}

    def _train(
        self, method: Method, some: Settings, context: Context, *, graphed: bool = False
    ) -> Record:
        config = self.config(context.quick)
        model, images = self.task.made(context.quick, context.device)
        optimizer = method.on(model, self.task.likelihood(), context.seed, some)
        run = {"epochs": config["epochs"][method.name], "batch": config["batch"]}
        run |= {k: some[k] for k in OF_THE_RUN if k in some}
        run |= self.task.run(images)
        with (
            optimizer if isinstance(optimizer, KFAC) else nullcontext(),  # which ends its hooks
            tensor_cores(context.device) if self.task.half else nullcontext(),
        ):
            return fit(model, optimizer, images, self.task.loss, context, graphed=graphed, **run)

    def line(self, record: Record) -> str:
        if "score" in record:
            return f"{_told(record['settings'])}, loss {record['score']:.4g}"
        loss, spent = record["train loss"][-1], record["seconds"][-1]
        return f"{_told(record['settings'])}, loss {loss:.4g} in {spent:.1f} s"

    def _found(self, results: Results) -> Found:
        return {m.name: results.of(m.name) for m in self._methods(results.quick)}

    def judge(self, results: Results) -> list[Check]:
        found = claims(self._found(results), self.less, self.fewer)
        # seconds of a tiny network are Python's; and only the full version speaks of the paper
        if results.quick:
            return recorded(found[: len(self.quick_held)], self.quick_held, ours={0})
        return recorded(found, self.held, ours={0, 1} if self.ours else ())

    def tables(self, results: Results) -> list[Table]:
        return [table(self._found(results), _told)]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        from .figure import draw  # matplotlib is slow to import

        seeds = f"{len(results.seeds)} seed{'s' if len(results.seeds) > 1 else ''}"
        return {"": draw(self._found(results), f"{self.task.title}, {seeds}")}

    def curves(self, results: Results) -> list[Chart]:
        found = self._found(results)
        return [
            Chart(
                f"{self.task.title}: {side} loss",
                f"{side} loss",
                [over_seeds(name, runs, f"{key} loss", _ALONG) for name, runs in found.items()],
                x=_ALONG,
                note="medians and quartiles over seeds",
            )
            for side, key in (("training", "train"), ("test", "test"))
        ]


def _trial(method: Method, place: int) -> tuple[str, ...]:
    return ("search", method.name, str(place))


def _told(some: Settings) -> str:
    return ", ".join(f"{k} {v:g}" if math.isfinite(v) else k for k, v in some.items())
