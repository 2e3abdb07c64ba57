"""What figures 4 and 6 are said to show, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..framework.results import Results
from ..framework.tabular import Table

Found = tuple[str, bool, str]


def means(results: Results, *key: str, row: int = 0) -> np.ndarray:
    """Accuracy by N, averaged over seeds."""
    return np.mean([r["accuracy"][row] for r in results.of(*key)], 0)


def claims(results: Results, config: dict[str, Any]) -> list[Found]:
    """The claims of figure 4's caption and section 3.1."""
    counts, depths, dim = np.array(config["samples"]), config["depths"], config["dim"]
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
        _behind("NGD with the sample Fisher matrix", natural, euclidean[1], ~few),
        _improves(population, natural, few),
        _behind("NGD with the population Fisher matrix", population, best, few | ~few),
        _logits(results),
        _coefficients(results, config),
        _least_squares(results, natural, few),
    ]


def _percent(values: np.ndarray) -> str:
    return ", ".join(f"{100 * v:.0f}%" for v in values)


def _depth_helps(euclidean: dict[int, np.ndarray], few: np.ndarray) -> Found:
    gain = np.minimum(euclidean[2], euclidean[3])[few] - euclidean[1][few]
    words = f"L = 2 and 3 are ahead of L = 1 by at least {_percent(gain)}"
    return "for N < D, EGD does better with L = 2 or 3 than with L = 1", bool(gain.min() > 0), words


def _ninety(euclidean: dict[int, np.ndarray], few: np.ndarray) -> Found:
    top = [float(euclidean[d][few].max()) for d in (2, 3)]
    words = f"at best {100 * top[0]:.0f}% and {100 * top[1]:.0f}%"
    return "for N < D, EGD with L = 2 and 3 reaches up to 90%", min(top) >= 0.88, words


def _on_par(deep: np.ndarray, shallow: np.ndarray, depth: int) -> Found:
    gap = float((deep - shallow).mean())
    claim = f"EGD with L = {depth} does no better than with L = 1"
    return claim, gap < 0.03, f"on average {100 * gap:+.0f} points"


def _at_chance(natural: np.ndarray, few: np.ndarray) -> Found:
    claim = "for N < D, NGD with the sample Fisher matrix is at chance"
    return claim, bool(natural[few].max() < 0.55), _percent(natural[few])


def _behind(name: str, one: np.ndarray, two: np.ndarray, where: np.ndarray) -> Found:
    gap = (two - one)[where]
    several = "for N ≥ D, " if not where.all() else "for all N, "
    what = "EGD with L = 1" if not where.all() else "the best EGD"
    words = f"by {100 * gap.min():.0f} to {100 * gap.max():.0f} points"
    return f"{several}{name} is behind {what}", bool(gap.min() > 0), words


def _improves(population: np.ndarray, natural: np.ndarray, few: np.ndarray) -> Found:
    gap = (population - natural)[few]
    words = f"by {100 * gap.min():.0f} to {100 * gap.max():.0f} points"
    return "for N < D, the population Fisher matrix does better", bool(gap.min() > 0), words


def _logits(results: Results) -> Found:
    runs = results.of("NGD", "L=1")
    off = max(float(np.abs(np.asarray(r["margins"])[-1] / r["time"][-1] - 1).max()) for r in runs)
    words = f"y·s/t is at most {off:.2f} from 1 at t = {runs[0]['time'][-1]:g}"
    return "for N < D, NGD's logits grow as t·y", off < 0.2, words


def share(beta: Any, nonzero: int) -> float:
    """The part of ‖β‖₁ on the true support."""
    size = np.abs(np.asarray(beta))
    return float(size[:nonzero].sum() / size.sum())


def _coefficients(results: Results, config: dict[str, Any]) -> Found:
    s = config["nonzero"]
    one, two = (float(np.mean([share(r["beta"][i], s) for r in results.of("EGD")])) for i in (0, 1))
    natural = float(np.mean([share(r["beta"], s) for r in results.of("NGD", "L=1")]))
    words = f"{100 * two:.0f}%, {100 * one:.0f}% and {100 * natural:.0f}% of |β| on the support"
    claim = "at the largest N, β is sparsest by EGD with L = 2, then L = 1, then NGD"
    return claim, two > one > natural, words


def _least_squares(results: Results, natural: np.ndarray, few: np.ndarray) -> Found:
    gap = float(np.abs(means(results, "NGD", "L=1", row=1) - natural)[few].max())
    return (
        "for N < D, NGD from zero is least squares",
        gap < 1e-6,
        f"accuracies differ by {gap:.0e}",
    )


def _late(results: Results) -> str:
    """How many flows ended at a larger loss than the others, where any did."""
    levels = [
        np.asarray(r["arrived"]) < r["levels"][-1] for r in results.of("EGD") if "arrived" in r
    ]
    count = sum(int(late.sum()) for late in levels)
    what = "1 flow" if count == 1 else f"{count} flows"
    return f"; {what} of EGD ended early, see `arrived`" if count else ""


def table(results: Results, config: dict[str, Any]) -> Table:
    """Accuracies in percent."""

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
    seeds = "1 seed" if len(results.seeds) == 1 else f"{len(results.seeds)} seeds"
    title = f"Test accuracy, percent, means over {seeds}; D = {config['dim']}{_late(results)}"
    return Table(["method", *(f"N={n}" for n in config["samples"])], rows, title)
