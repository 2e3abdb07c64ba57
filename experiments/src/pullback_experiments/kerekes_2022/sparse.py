"""Figures 4 and 6: sparse classification with fewer and with more samples than dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from pullback import PullbackError

from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart
from ..framework.experiment import Context, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from . import figures
from .common import (
    Repeated,
    expected_accuracy,
    flat_start,
    generator,
    last,
    population_descent,
    sample_descent,
    sparse,
)
from .margins import EuclideanFlow, Signed
from .solutions import ridgeless

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
        expected_outcomes: which claims held in the full runs.
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
    expected_outcomes: Sequence[bool]

    def config(self, quick: bool) -> dict[str, Any]:
        sizes = (self.dim, self.nonzero, tuple(self.samples), tuple(self.depths))
        natural_depths = list(self.natural_depths)
        levels = list(self.levels)
        if quick:
            sizes = self.small
            natural_depths = natural_depths[:1]
            levels = levels[:4]
        dim, nonzero, samples, depths = sizes
        return {
            "dim": dim,
            "nonzero": nonzero,
            "samples": list(samples),
            "depths": list(depths),
            "natural depths": natural_depths,
            "scale": self.scale,
            "levels": levels,
            "lr": self.lr,
            "end": self.end,
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, small=(12, 2, (6, 24), (1, 2)), levels=(2, 5))

    def items(self, quick: bool) -> list[Item]:
        config = self.config(quick)
        natural = [
            Item(("NGD", f"L={depth}"), partial(_run_natural_descent, depth, config))
            for depth in config["natural depths"]
        ]
        population = Item(("NGD, population",), partial(_run_population_descent, config))
        return [Item(("EGD",), partial(_run_euclidean_flows, config)), *natural, population]

    def line(self, record: Record) -> str:
        last = record["accuracy"][0]
        return "accuracy " + ", ".join(f"{100 * a:.0f}%" for a in last)

    def judge(self, results: Results) -> list[Check]:
        checks = claims(results, self.config(results.quick))
        # small sizes show the same, less clearly: only the full version says so of the paper
        if results.quick:
            return []
        return make_checks(checks, self.expected_outcomes, ours={len(checks) - 1})

    def curves(self, results: Results) -> list[Chart]:
        return figures.sparse(results, self.config(results.quick))

    def tables(self, results: Results) -> list[Table]:
        return [table(results, self.config(results.quick))]

    def draw(self, results: Results) -> dict[str, Figure]:
        return {"": figures.draw_sparse(results, self.config(results.quick))}


def _draw_data(config: dict[str, Any], context: Context) -> list[tuple[Tensor, Tensor]]:
    """Return the first N samples of one data set, for every N."""
    source = generator(context.seed)
    counts = config["samples"]
    x, y = sparse(max(counts), config["dim"], config["nonzero"], source, context.device)
    return [(x[:n], y[:n]) for n in counts]


def _run_euclidean_flows(config: dict[str, Any], context: Context) -> Record:
    """Return the record of Euclidean flows from every depth on every number of samples N.

    It has accuracy[depth][N] at the last level of the loss, path[level][depth][N] at all levels, β
    of the largest N, and arrived[depth][N], the last level that a flow came to. At later levels β
    stays as it is there.
    """
    data = _draw_data(config, context)
    levels = config["levels"]
    runs: list[tuple[int, tuple[Tensor, Tensor]]] = list(product(config["depths"], data))
    path = []
    ends = []
    arrived = []
    for number, (depth, pair) in enumerate(runs):  # one by one: sizes and times differ widely

        def watch(level: float, reached: float, first_run: int = number) -> None:
            context.watch((first_run + reached) / len(runs), f"loss e^−{level:g}")

        betas = _flow_to_levels(Signed.of([pair]), depth, config["scale"], levels, watch)
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


def _flow_to_levels(
    data: Signed,
    depth: int,
    scale: float,
    levels: Sequence[float],
    watch: Callable[[float, float], None],
) -> Tensor:
    """Return β of a single flow at every level of the loss that it comes to, (levels, D)."""
    flow = EuclideanFlow(data, depth, scale, rtol=3e-4)
    v = None
    betas = []
    for number, level in enumerate(levels):

        def share(reached: Tensor, first_level: int = number, level: float = level) -> None:
            watch(level, (first_level + float((reached / level).clamp(0, 1))) / len(levels))

        try:
            v = flow.run(level, v, share)
        except PullbackError:
            if v is None:
                raise
            break
        betas.append(flow.beta(v)[0])
    return torch.stack(betas)


def _run_natural_descent(depth: int, config: dict[str, Any], context: Context) -> Record:
    """Return the record of natural gradient descent: accuracies, beside those of least squares.

    Of the largest N below D it also has the margins y∘s after every step.
    """
    data = _draw_data(config, context)
    dim = config["dim"]
    nonzero = config["nonzero"]
    steps = round(config["end"] / config["lr"])
    accuracy = []
    reached = []
    logits = []
    beta = torch.zeros(dim, dtype=data[0][0].dtype, device=context.device)
    below = max((n for n in config["samples"] if n < dim), default=None)
    for number, (x, y) in enumerate(data):
        model = flat_start(dim, depth, 1.0, context.device)
        times = 0
        try:
            for beta in sample_descent(model, x, y, config["lr"], steps):
                times += 1
                if len(x) == below:
                    logits.append((y * (x @ beta))[:50].cpu())
                context.watch((number + times / steps) / len(data), f"{len(x)} samples")
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


def _run_population_descent(config: dict[str, Any], context: Context) -> Record:
    """Return accuracy[0][N] with F averaged over N(0, 1), at L = 1: any depth has the same path."""
    accuracy = []
    beta = torch.zeros(config["dim"])
    for x, y in _draw_data(config, context):
        model = flat_start(config["dim"], 1, 1.0, context.device)
        beta = last(population_descent(model, x, y, 0.5, 400))
        accuracy.append(float(expected_accuracy(beta, config["nonzero"])))
    return {"accuracy": [accuracy], "beta": beta.cpu()}


def means(results: Results, *key: str, row: int = 0) -> np.ndarray:
    """Return the accuracy by N, averaged over seeds."""
    return np.mean([r["accuracy"][row] for r in results.of(*key)], 0)


def claims(results: Results, config: dict[str, Any]) -> list[Claim]:
    """Return the checks of figure 4's caption and section 3.1."""
    counts = np.array(config["samples"])
    depths = config["depths"]
    dim = config["dim"]
    few = counts < dim
    euclidean = {d: means(results, "EGD", row=i) for i, d in enumerate(depths)}
    natural = means(results, "NGD", "L=1")
    population = means(results, "NGD, population")
    best = np.max(list(euclidean.values()), 0)
    deepest = depths[-1]
    return [
        _depth_helps(euclidean, few),
        _ninety(euclidean, few),
        _on_par(euclidean[deepest], euclidean[1], deepest),
        _at_chance(natural, few),
        _claim_behind("NGD with the sample Fisher matrix", natural, euclidean[1], ~few),
        _improves(population, natural, few),
        _claim_behind("NGD with the population Fisher matrix", population, best, few | ~few),
        _claim_logits(results),
        _claim_coefficients(results, config),
        _least_squares(results, natural, few),
    ]


def _percent(values: np.ndarray) -> str:
    return ", ".join(f"{100 * v:.0f}%" for v in values)


def _depth_helps(euclidean: dict[int, np.ndarray], few: np.ndarray) -> Claim:
    gain = np.minimum(euclidean[2], euclidean[3])[few] - euclidean[1][few]
    words = f"L = 2 and 3 are ahead of L = 1 by at least {_percent(gain)}"
    return "for N < D, EGD does better with L = 2 or 3 than with L = 1", bool(gain.min() > 0), words


def _ninety(euclidean: dict[int, np.ndarray], few: np.ndarray) -> Claim:
    top = [float(euclidean[d][few].max()) for d in (2, 3)]
    words = f"at best {100 * top[0]:.0f}% and {100 * top[1]:.0f}%"
    return "for N < D, EGD with L = 2 and 3 reaches up to 90%", min(top) >= 0.88, words


def _on_par(deep: np.ndarray, shallow: np.ndarray, depth: int) -> Claim:
    gap = float((deep - shallow).mean())
    claim = f"EGD with L = {depth} does no better than with L = 1"
    return claim, gap < 0.03, f"on average {100 * gap:+.0f} points"


def _at_chance(natural: np.ndarray, few: np.ndarray) -> Claim:
    claim = "for N < D, NGD with the sample Fisher matrix is at chance"
    return claim, bool(natural[few].max() < 0.55), _percent(natural[few])


def _claim_behind(name: str, one: np.ndarray, two: np.ndarray, where: np.ndarray) -> Claim:
    gap = (two - one)[where]
    claim = f"for N ≥ D, {name} is behind EGD with L = 1"
    if where.all():
        claim = f"for all N, {name} is behind the best EGD"
    words = f"by {100 * gap.min():.0f} to {100 * gap.max():.0f} points"
    return claim, bool(gap.min() > 0), words


def _improves(population: np.ndarray, natural: np.ndarray, few: np.ndarray) -> Claim:
    gap = (population - natural)[few]
    words = f"by {100 * gap.min():.0f} to {100 * gap.max():.0f} points"
    return "for N < D, the population Fisher matrix does better", bool(gap.min() > 0), words


def _claim_logits(results: Results) -> Claim:
    runs = results.of("NGD", "L=1")
    off = max(float(np.abs(np.asarray(r["margins"])[-1] / r["time"][-1] - 1).max()) for r in runs)
    words = f"y·s/t is at most {off:.2f} from 1 at t = {runs[0]['time'][-1]:g}"
    return "for N < D, NGD's logits grow as t·y", off < 0.2, words


def share(beta: Any, nonzero: int) -> float:
    """Return the part of ‖β‖₁ on the true support."""
    size = np.abs(np.asarray(beta))
    return float(size[:nonzero].sum() / size.sum())


def _claim_coefficients(results: Results, config: dict[str, Any]) -> Claim:
    s = config["nonzero"]
    one = float(np.mean([share(r["beta"][0], s) for r in results.of("EGD")]))
    two = float(np.mean([share(r["beta"][1], s) for r in results.of("EGD")]))
    natural = float(np.mean([share(r["beta"], s) for r in results.of("NGD", "L=1")]))
    words = f"{100 * two:.0f}%, {100 * one:.0f}% and {100 * natural:.0f}% of |β| on the support"
    claim = "at the largest N, β is sparsest by EGD with L = 2, then L = 1, then NGD"
    return claim, two > one > natural, words


def _least_squares(results: Results, natural: np.ndarray, few: np.ndarray) -> Claim:
    gap = float(np.abs(means(results, "NGD", "L=1", row=1) - natural)[few].max())
    return (
        "for N < D, NGD from zero is least squares",
        gap < 1e-6,
        f"accuracies differ by {gap:.0e}",
    )


def _late(results: Results) -> str:
    """Return a remark on flows that ended at a larger loss than the others, or ""."""
    levels = [
        np.asarray(r["arrived"]) < r["levels"][-1] for r in results.of("EGD") if "arrived" in r
    ]
    count = sum(int(has_failed.sum()) for has_failed in levels)
    if count == 1:
        what = "1 flow"
    else:
        what = f"{count} flows"
    if count:
        return f"; {what} of EGD ended early, see `arrived`"
    return ""


def table(results: Results, config: dict[str, Any]) -> Table:
    """Return the accuracies in percent."""

    def line(name: str, values: Sequence[float]) -> list[str]:
        return [name, *(f"{100 * v:.1f}" for v in values)]

    rows = [
        line(f"EGD, L = {d}", means(results, "EGD", row=i).tolist())
        for i, d in enumerate(config["depths"])
    ]
    for depth in config["natural depths"]:
        rows.append(line(f"NGD, L = {depth}", means(results, "NGD", f"L={depth}").tolist()))
    rows.append(line("NGD, population", means(results, "NGD, population").tolist()))
    rows.append(line("least squares", means(results, "NGD", "L=1", row=1).tolist()))
    if len(results.seeds) == 1:
        seeds = "1 seed"
    else:
        seeds = f"{len(results.seeds)} seeds"
    title = f"Test accuracy, percent, means over {seeds}; D = {config['dim']}{_late(results)}"
    return Table(["method", *(f"N={n}" for n in config["samples"])], rows, title)
