"""Figures 4 and 6: sparse classification with fewer and with more samples than dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from pullback import PullbackError
from pullback.linear.solutions import ridgeless

from ..framework.check import Check, recorded
from ..framework.curves import Chart
from ..framework.experiment import Context, Item
from ..framework.plain import Record
from ..framework.results import Results
from ..framework.tabular import Table
from . import charts
from .common import Repeated, expected_accuracy, flat_start, generator, sparse
from .margins import EuclideanFlow, Signed
from .natural import last, population_descent, sample_descent
from .sparse_claims import claims

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Sparse(Repeated):
    """Accuracy against the number of samples, for depths of EGD and two Fisher matrices of NGD.

    Attributes:
        dim: D.
        nonzero: S, the entries of the true separator that are 1.
        samples: N.
        depths: L of EGD.
        natural_depths: L of NGD with the sample Fisher matrix.
        small: dim, nonzero, samples and depths of the quick version.
        scale: α of EGD's start w₁ = … = w_{L−1} = α, w_L = 0; NGD starts with α = 1.
        levels: −log ℓ at which EGD is looked at; the last is taken for its limit.
        lr: of NGD with the sample Fisher matrix.
        end: lr times its steps.
        held: which claims held in the full runs.
    """

    dim: int
    nonzero: int
    samples: Sequence[int]
    depths: Sequence[int]
    natural_depths: Sequence[int]
    small: tuple[int, int, tuple[int, ...], tuple[int, ...]]
    scale: float = 0.1
    levels: Sequence[float] = (2, 5, 10, 100, 1000)
    lr: float = 0.1
    end: float = 20.0
    held: Sequence[bool]

    def config(self, quick: bool) -> dict[str, Any]:
        sizes = (self.dim, self.nonzero, tuple(self.samples), tuple(self.depths))
        dim, nonzero, samples, depths = self.small if quick else sizes
        return {
            "dim": dim,
            "nonzero": nonzero,
            "samples": list(samples),
            "depths": list(depths),
            "natural depths": list(self.natural_depths[:1] if quick else self.natural_depths),
            "scale": self.scale,
            "levels": list(self.levels[:4] if quick else self.levels),
            "lr": self.lr,
            "end": self.end,
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, small=(12, 2, (6, 24), (1, 2)), levels=(2, 5))

    def items(self, quick: bool) -> list[Item]:
        config = self.config(quick)
        natural = [
            Item(("NGD", f"L={depth}"), partial(_natural, depth, config))
            for depth in config["natural depths"]
        ]
        population = Item(("NGD, population",), partial(_population, config))
        return [Item(("EGD",), partial(_euclidean, config)), *natural, population]

    def line(self, record: Record) -> str:
        last = record["accuracy"][0]
        return "accuracy " + ", ".join(f"{100 * a:.0f}%" for a in last)

    def judge(self, results: Results) -> list[Check]:
        found = claims(results, self.config(results.quick))
        # small sizes show the same, less clearly: only the full version says so of the paper
        return [] if results.quick else recorded(found, self.held, ours={len(found) - 1})

    def curves(self, results: Results) -> list[Chart]:
        return charts.sparse(results, self.config(results.quick))

    def tables(self, results: Results) -> list[Table]:
        from .sparse_claims import table

        return [table(results, self.config(results.quick))]

    def draw(self, results: Results) -> dict[str, Figure]:
        from .draw_sparse import draw

        return {"": draw(results, self.config(results.quick))}


def _data(config: dict[str, Any], context: Context) -> list[tuple[Tensor, Tensor]]:
    """The first N samples of one data set, for every N."""
    source, counts = generator(context.seed), config["samples"]
    x, y = sparse(max(counts), config["dim"], config["nonzero"], source, context.device)
    return [(x[:n], y[:n]) for n in counts]


def _euclidean(config: dict[str, Any], context: Context) -> Record:
    """accuracy[depth][N] at the last level, path[level][depth][N], and β of the largest N.

    `arrived`[depth][N] is the last level that a flow came to; it is looked at there from then on.
    """
    data, levels = _data(config, context), config["levels"]
    runs = [(depth, pair) for depth in config["depths"] for pair in data]
    path, ends, arrived = [], [], []
    for place, (depth, pair) in enumerate(runs):  # one by one: sizes and times differ widely

        def watch(level: float, done: float, place: int = place) -> None:
            context.watch((place + done) / len(runs), f"loss e^−{level:g}")

        betas = _levels(Signed.of([pair]), depth, config["scale"], levels, watch)
        arrived.append(levels[len(betas) - 1])
        betas = torch.cat([betas, betas[-1:].expand(len(levels) - len(betas), -1)])
        path.append(expected_accuracy(betas, config["nonzero"]))
        ends.append(betas[-1])
    shape = (len(config["depths"]), len(data), -1)
    accuracy = torch.stack(path).view(shape).permute(2, 0, 1).tolist()
    return {
        "accuracy": accuracy[-1],
        "path": accuracy,
        "levels": levels,
        "arrived": torch.tensor(arrived).view(shape[:2]).tolist(),
        "beta": torch.stack(ends).view(shape)[:, -1].cpu(),
    }


def _levels(
    data: Signed,
    depth: int,
    scale: float,
    levels: Sequence[float],
    watch: Callable[[float, float], None],
) -> Tensor:
    """β of a single flow at every level that it comes to, (levels, D)."""
    flow, v, betas = EuclideanFlow(data, depth, scale, rtol=3e-4), None, []
    for place, level in enumerate(levels):

        def share(reached: Tensor, place: int = place, level: float = level) -> None:
            watch(level, (place + float((reached / level).clamp(0, 1))) / len(levels))

        try:
            v = flow.run(level, v, share)
        except PullbackError:
            if v is None:
                raise
            break
        betas.append(flow.beta(v)[0])
    return torch.stack(betas)


def _natural(depth: int, config: dict[str, Any], context: Context) -> Record:
    """accuracy[0][N]; along the way y∘s of the largest N < D at all times; least squares beside."""
    data, dim, nonzero = _data(config, context), config["dim"], config["nonzero"]
    steps, accuracy, reached, logits = round(config["end"] / config["lr"]), [], [], []
    beta = torch.zeros(dim, dtype=data[0][0].dtype, device=context.device)
    below = max((n for n in config["samples"] if n < dim), default=None)
    for place, (x, y) in enumerate(data):
        model, times = flat_start(dim, depth, 1.0, context.device), 0
        try:
            for beta in sample_descent(model, x, y, config["lr"], steps):
                times += 1
                if len(x) == below:
                    logits.append((y * (x @ beta))[:50].cpu())
                context.watch((place + times / steps) / len(data), f"{len(x)} samples")
        except PullbackError:  # a logit of the wrong sign grew beyond measure: it ends there
            beta = model.beta.detach()
        accuracy.append(float(expected_accuracy(beta, nonzero)))
        reached.append(times * config["lr"])
    squares = [float(expected_accuracy(ridgeless(x, y), nonzero)) for x, y in data]
    return {
        "accuracy": [accuracy, squares],
        "reached": reached,
        "time": [config["lr"] * (i + 1) for i in range(len(logits))],
        "margins": torch.stack(logits) if logits else [],
        "beta": beta.cpu(),
    }


def _population(config: dict[str, Any], context: Context) -> Record:
    """accuracy[0][N] with F averaged over N(0, 1), at L = 1: its path is the same at any depth."""
    accuracy = []
    beta = torch.zeros(config["dim"])
    for x, y in _data(config, context):
        model = flat_start(config["dim"], 1, 1.0, context.device)
        beta = last(population_descent(model, x, y, 0.5, 400))
        accuracy.append(float(expected_accuracy(beta, config["nonzero"])))
    return {"accuracy": [accuracy], "beta": beta.cpu()}
