"""The same function, badly scaled: which optimizers notice?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from pullback.likelihoods import Categorical
from pullback.symmetry import Sliced, SliceSGD, Symmetry

from ..framework import plots
from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart, Line, Series, Style, finite, quantiles
from ..framework.experiment import Context, Experiment, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from ..learning.natural import close_kfac, natural_kfac
from ..learning.training import TrainingOptions, fit
from .figure2 import PAPER
from .networks import NETWORKS, digits, start

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: (model, its symmetry, learning rate, seed) ↦ optimizer
Build = Callable[[nn.Module, Symmetry, float, int], Optimizer]


@dataclass(frozen=True)
class RescaledMethod:
    """Something to compare.

    Attributes:
        name: in tables and figures.
        build: the optimizer.
        rates: learning rates, of which the best on the network as it was is used.
        sliced: whether it lives on a slice, so that the scale of the start is forgotten.
    """

    name: str
    build: Build
    rates: Sequence[float]
    sliced: bool = False

    def describe(self) -> dict[str, Any]:
        """Return everything a run depends on."""
        return {"rates": list(self.rates), "sliced": self.sliced}


def _sgd(model: nn.Module, symmetry: Symmetry, lr: float, seed: int, momentum: float) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=momentum)


def _slice(
    model: nn.Module, symmetry: Symmetry, lr: float, seed: int, momentum: float
) -> Optimizer:
    return SliceSGD(model, lr, momentum=momentum, symmetry=symmetry)


def _adam(model: nn.Module, symmetry: Symmetry, lr: float, seed: int) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


def _sliced_adam(model: nn.Module, symmetry: Symmetry, lr: float, seed: int) -> Optimizer:
    return Sliced(_adam(model, symmetry, lr, seed), symmetry)


def _kfac(model: nn.Module, symmetry: Symmetry, lr: float, seed: int) -> Optimizer:
    return natural_kfac(
        model, lr, likelihood=Categorical(), damping=0.1, seed=seed,
        kl_clip=None, statistics_every=2, invert_every=5,
    )  # fmt: skip


def _sliced_kfac(model: nn.Module, symmetry: Symmetry, lr: float, seed: int) -> Optimizer:
    return Sliced(_kfac(model, symmetry, lr, seed), symmetry)


SGD = "SGD"
MOMENTUM = "SGD, momentum"
ADAM = "Adam"
KRONECKER = "K-FAC"
SLICE = "SliceSGD"
SLICE_MOMENTUM = "SliceSGD, momentum"
SLICED_ADAM = "Sliced Adam"
SLICED_KRONECKER = "Sliced K-FAC"

_PLAIN = (0.03, 0.1, 0.3)
_HEAVY = (0.01, 0.03, 0.1)
_ADAM = (1e-3, 3e-3, 1e-2)
METHODS = (
    RescaledMethod(SGD, partial(_sgd, momentum=0.0), _PLAIN),
    RescaledMethod(MOMENTUM, partial(_sgd, momentum=0.9), _HEAVY),
    RescaledMethod(ADAM, _adam, _ADAM),
    RescaledMethod(KRONECKER, _kfac, _HEAVY),
    RescaledMethod(SLICE, partial(_slice, momentum=0.0), _PLAIN, sliced=True),
    RescaledMethod(SLICE_MOMENTUM, partial(_slice, momentum=0.9), _HEAVY, sliced=True),
    RescaledMethod(SLICED_ADAM, _sliced_adam, _ADAM, sliced=True),
    RescaledMethod(SLICED_KRONECKER, _sliced_kfac, _HEAVY, sliced=True),
)


#: network, and whether it is trained before it is rescaled
STARTS: Mapping[str, tuple[str, bool]] = {
    "fresh MLP": ("MLP", False),
    "trained MLP": ("MLP", True),
    "fresh conv net": ("conv net", False),
}


@dataclass(frozen=True, kw_only=True)
class Rescaling(Experiment):
    """Digits; each unit is scaled by 10^±size, then the network is trained for some epochs.

    Attributes:
        sizes: 0 is the network as it was.
        search_seed: on which rates are chosen.
        epochs, batch: of every run.
        expected_outcomes: which claims held in the full runs.
    """

    sizes: Sequence[int] = (0, 1, 2, 3)
    search_seed: int = 100
    epochs: int = 5
    batch: int = 64
    expected_outcomes: Sequence[bool] = (True,) * 5
    paper: str = PAPER
    seeds: Sequence[int] = (0, 1, 2)

    def config(self, quick: bool) -> dict[str, Any]:
        sizes = list(self.sizes)
        starts = list(STARTS)
        if quick:
            sizes = [sizes[0], sizes[-1]]
            starts = starts[:1]
        return {
            "sizes": sizes,
            "starts": starts,
            "epochs": self.epochs,
            "batch": self.batch,
            "methods": {m.name: m.describe() for m in METHODS},
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, batch=512, epochs=1)

    def items(self, quick: bool) -> list[Item]:
        config = self.config(quick)
        out = []
        used = {STARTS[name][0] for name in config["starts"]}
        for network in (n for n in NETWORKS if n in used):
            for m in METHODS:
                work = partial(self._search, network, m)
                out.append(Item(("search", network, m.name), work, once=True, resumable=True))
        for name in config["starts"]:
            for m in METHODS:
                for size in config["sizes"]:
                    work = partial(self._train_at_best, name, m, size)
                    out.append(Item((name, m.name, str(size)), work, resumable=True))
        return out

    def _search(self, network: str, method: RescaledMethod, context: Context) -> Record:
        """Return the rate of the lowest mean log training loss, on the network that is not
        rescaled.
        """
        scores = []
        for number, rate in enumerate(method.rates):
            torch.manual_seed(self.search_seed)
            folder = context.checkpoint_folder / str(number)
            search_context = replace(context, seed=self.search_seed, checkpoint_folder=folder)
            record = self._train(network, False, method, 0, rate, search_context)
            losses = [finite(v) for v in record["train loss"][1:]]
            scores.append(sum(math.log(max(v, 1e-12)) for v in losses) / len(losses))
        best = min(range(len(scores)), key=scores.__getitem__)
        return {"rate": method.rates[best], "scores": scores}

    def _train_at_best(
        self, name: str, method: RescaledMethod, size: int, context: Context
    ) -> Record:
        network, trained = STARTS[name]
        rate = context.finished.once("search", network, method.name)["rate"]
        return self._train(network, trained, method, size, rate, context)

    def _train(
        self,
        network: str,
        trained: bool,
        method: RescaledMethod,
        size: int,
        rate: float,
        context: Context,
    ) -> Record:
        model, symmetry, moved = start(network, trained, size, context.seed, context.device)
        optimizer = method.build(model, symmetry, rate, context.seed)
        images = digits(torch.float64).to(context.device)
        epochs = self.config(context.quick)["epochs"]
        with close_kfac(getattr(optimizer, "optimizer", optimizer)):
            options = TrainingOptions(epochs=epochs, batch=self.batch)
            record = fit(model, optimizer, images, F.cross_entropy, context, options)
        return {"rate": rate, "moved": moved, **record}

    def line(self, record: Record) -> str:
        if "scores" in record:
            return f"lr {record['rate']:g}"
        return f"loss {record['train loss'][-1]:.3g}"

    def _ends(self, results: Results) -> Ends:
        config = self.config(results.quick)
        ends: dict[str, dict[str, dict[int, list[Record]]]] = {}
        for name in config["starts"]:
            ends[name] = {}
            for method in METHODS:
                by_size = {s: results.of(name, method.name, str(s)) for s in config["sizes"]}
                ends[name][method.name] = by_size
        return ends

    def judge(self, results: Results) -> list[Check]:
        return claims(self._ends(results), self.expected_outcomes)

    def curves(self, results: Results) -> list[Chart]:
        return chart_final_losses(self._ends(results))

    def tables(self, results: Results) -> list[Table]:
        return [table(name, ends) for name, ends in self._ends(results).items()]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        return {"": draw(self._ends(results), len(results.seeds))}


#: records, one per seed, by start, method and size
Ends = Mapping[str, Mapping[str, Mapping[int, Sequence[Record]]]]


@dataclass(frozen=True)
class RescalingLimits:
    """What the words of the claims mean, and where lost runs are drawn."""

    #: curves whose losses differ by less, relative, are the same
    largest_equal: float = 1e-6
    #: a run that ends with so many times the loss is slow
    slow: float = 3.0
    #: losses beyond are drawn here: lost
    top: float = 30.0


LIMITS = RescalingLimits()
_SLICED = tuple(m.name for m in METHODS if m.sliced)


def claims(ends: Ends, expected_outcomes: Sequence[bool]) -> list[Check]:
    """Return checks of our own claims: the paper does not rescale."""
    by_method = next(iter(ends.values()))
    largest = max(next(iter(by_method.values())))
    checks = [
        _claim_same(ends, _SLICED),
        *(_claim_slow(ends, name, largest) for name in (SGD, MOMENTUM, ADAM, KRONECKER)),
    ]
    return make_checks(checks, expected_outcomes, ours=range(len(checks)))


def final(records: Sequence[Record]) -> float:
    """Return the median over seeds of the last training loss, ∞ for a lost run."""
    return quantiles([finite(r["train loss"][-1]) for r in records])[1]


def measure_difference(one: Record, two: Record) -> float:
    """Return the largest relative difference of two curves of the training loss."""
    a = one["train loss"]
    b = two["train loss"]
    if len(a) != len(b):
        return math.inf
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def _claim_same(ends: Ends, names: Sequence[str]) -> Claim:
    worst = 0.0
    for methods, name in product(ends.values(), names):
        plain, *rescaled = methods[name].values()
        for runs in rescaled:
            worst = max([worst, *map(measure_difference, runs, plain)])
    claim = f"{', '.join(names)} run as if nothing had been rescaled"
    return (
        claim,
        worst <= LIMITS.largest_equal,
        f"losses at all epochs within {worst:.0e}, relative",
    )


def _claim_slow(ends: Ends, name: str, size: int) -> Claim:
    each = {start: (final(by[name][size]), final(by[name][0])) for start, by in ends.items()}
    holds = all(a >= LIMITS.slow * b for a, b in each.values())
    numbers = "; ".join(f"{start}: {_loss(a)} for {_loss(b)}" for start, (a, b) in each.items())
    claim = (
        f"after {_factor(size)} {name} breaks or ends with {LIMITS.slow:g} times the loss and more"
    )
    return claim, holds, numbers


def _factor(size: int) -> str:
    """By what units are multiplied.

    >>> _factor(3)
    '10³ or 10⁻³'
    """
    power = "⁰¹²³⁴⁵⁶⁷⁸⁹"[size]
    return f"10{power} or 10⁻{power}"


def _loss(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.2g}"
    return "lost"


def table(start: str, records_by_size: Mapping[str, Mapping[int, Sequence[Record]]]) -> Table:
    """Return final training losses by size, medians over seeds."""
    sizes = list(next(iter(records_by_size.values())))
    rows = []
    for name, by_size in records_by_size.items():
        losses = [_loss(final(by_size[size])) for size in sizes]
        rows.append([name, f"{by_size[0][0]['rate']:g}", *losses])
    heads = ["as it was", *map(_factor, sizes[1:])]
    count = len(next(iter(records_by_size.values()))[0])
    return Table(["method", "lr", *heads], rows, f"{start}: median training loss of {count} seeds")


_MARKS = "os^D"
_PLACES = plots.assign_places(m.name for m in METHODS)


def draw(ends_by_start: Ends, seeds: int) -> Figure:
    """Draw one panel per start; the lines of sliced optimizers are dashed."""
    title = r"Training loss after rescaling each unit by $10^{\pm s}$"
    title += f"; {seeds} seeds, medians and range"
    figure = plots.make_figure(4.2 * len(ends_by_start) + 2.2, 5.4, title, dpi=110)
    grid = figure.subplots(1, len(ends_by_start), squeeze=False, sharey=True)[0]
    for axes, (name, methods) in zip(grid, ends_by_start.items(), strict=True):
        sizes = list(methods[METHODS[0].name])
        for i, m in enumerate(METHODS):
            color = plots.PALETTE[_PLACES[m.name]]
            ends = [_drawn_losses(methods[m.name][size]) for size in sizes]
            # side by side, since sliced ones lie on top of each other
            x = np.array(sizes) + 0.04 * (i % 4 - 1.5)
            middle = np.array([quantiles(e)[1] for e in ends])
            bars = [middle - [min(e) for e in ends], [max(e) for e in ends] - middle]
            style = "-"
            if m.sliced:
                style = "--"
            axes.errorbar(
                x, middle, bars, fmt=style, marker=_MARKS[i % 4], ms=5,
                color=color, lw=1.7, elinewidth=0.8, label=m.name,
            )  # fmt: skip
        plots.format_axes(axes, logx=False)
        axes.set_xticks(sizes, ["as it was", *(rf"$10^{{\pm {s}}}$" for s in sizes[1:])])
        axes.axhline(np.log(10), color=plots.INK, lw=0.8, ls=":")
        axes.axhline(LIMITS.top, color=plots.INK, lw=0.8)
        plots.label(axes, "size s of the rescaling", title=name)
    plots.label(grid[0], y="training loss (top: lost, dotted: chance)")
    grid[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def chart_final_losses(ends: Ends) -> list[Chart]:
    """Return the chart of the final loss against the size."""
    charts = []
    for name, methods in ends.items():
        series = [
            _ends(m.name, methods[m.name], _PLACES[m.name], plots.choose_dashes(m.name))
            for m in METHODS
        ]
        chart = Chart(
            name.capitalize().replace("mlp", "MLP"),
            "training loss",
            series,
            x={"size": "size s of the rescaling by 10ˢ or 10⁻ˢ"},
            logx=False,
            note="medians and range over seeds; dashed: on a slice; losses above 30 are left out",
        )
        charts.append(chart)
    return charts


def _drawn_losses(runs: Sequence[Record]) -> list[float]:
    """Return the final losses; those of lost runs are at the top of the panel."""
    return [min(finite(r["train loss"][-1]), LIMITS.top) for r in runs]


def _charted_losses(runs: Sequence[Record]) -> list[float]:
    """Return the final losses; ∞, which a chart leaves out, for lost runs."""
    losses = [r["train loss"][-1] for r in runs]
    return [_infinite_above(LIMITS.top, loss) for loss in losses]


def _infinite_above(limit: float, loss: float) -> float:
    if loss <= limit:  # a loss that is no number is not
        return loss
    return math.inf


def _ends(
    name: str, by_size: Mapping[int, Sequence[Record]], color: int, style: Style
) -> Series | None:
    ends = {size: _charted_losses(runs) for size, runs in by_size.items() if runs}
    if not ends:
        return None
    middle = [quantiles(e)[1] for e in ends.values()]
    low = [min(e) for e in ends.values()]
    high = [max(e) for e in ends.values()]
    return Series(name, {"size": Line(list(ends), middle, low, high)}, color, style)
