"""Figure 5: completing a rank-5 matrix by EGD and NGD at several depths, and by nuclear norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from pullback import PullbackError
from pullback.linear import DeepMatrix

from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart
from ..framework.experiment import Context, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from . import figures
from .common import Repeated, generator, normal
from .factorization import FISHERS, Observed, descend, effective_rank, product, search
from .solutions import nuclear_norm_completion

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Completion(Repeated):
    """Errors on entries that are not observed.

    Attributes:
        size: of the square matrix, whose entries have mean square 1.
        rank: of it.
        counts: of observed entries.
        depths: L.
        small: size, rank, counts and depths of the quick version.
        start: the size of β at the start of EGD, times √size; NGD starts at 1.
        steps: of EGD at most.
        collapsed: the depth whose random start the controls have.
        trials: of the search for NGD that completes.
        expected_outcomes: which claims held in the full runs.
    """

    size: int = 100
    rank: int = 5
    counts: Sequence[int] = (1000, 1500, 2000, 2500, 3000, 4000, 5000)
    depths: Sequence[int] = (1, 2, 3, 4)
    small: tuple[int, int, tuple[int, ...], tuple[int, ...]] = (
        24, 2, (150, 200, 300, 400), (1, 2, 3)
    )  # fmt: skip
    start: float = 1e-3
    steps: int = 20_000
    collapsed: int = 6
    trials: int = 48
    expected_outcomes: Sequence[bool] = (True,) * 6 + (False,) * 2

    def config(self, quick: bool) -> dict[str, Any]:
        sizes = (self.size, self.rank, tuple(self.counts), tuple(self.depths))
        steps = self.steps
        trials = self.trials
        if quick:
            sizes = self.small
            steps = min(steps, 2000)
            trials = min(trials, 12)
        size, rank, counts, depths = sizes
        return {
            "size": size,
            "rank": rank,
            "counts": list(counts),
            "depths": list(depths),
            "start": self.start,
            "steps": steps,
            "collapsed": self.collapsed,
            "trials": trials,
        }

    def smoke(self) -> Self:
        small = (8, 1, (30, 50), (1, 2, 3))
        return replace(self, judged=False, small=small, steps=100, trials=1)

    def items(self, quick: bool) -> list[Item]:
        config = self.config(quick)
        out = []
        for depth in config["depths"]:
            out.append(Item(("EGD", f"L={depth}"), partial(_euclidean, depth, 1, config)))
            out.append(Item(("NGD", f"L={depth}"), partial(_natural, depth, config)))
        for depth in (2, 3):
            work = partial(_euclidean, depth, config["collapsed"] // depth, config)
            out.append(Item(("EGD, collapsed start", f"L={depth}"), work))
        out.append(Item(("nuclear norm",), partial(_nuclear, config)))
        out.append(Item(("search",), partial(search, config["trials"], config["steps"])))
        return out

    def line(self, record: Record) -> str:
        if "error" not in record:
            return f"{len(record['trials'])} trials"
        return "error " + ", ".join(f"{e:.2g}" for e in record["error"])

    def judge(self, results: Results) -> list[Check]:
        checks = claims(results, self.config(results.quick))
        # small sizes show the same, less clearly: only the full version says so of the paper
        if results.quick:
            return []
        return make_checks(checks, self.expected_outcomes, ours={6, 7})

    def curves(self, results: Results) -> list[Chart]:
        return figures.completion(results, self.config(results.quick))

    def tables(self, results: Results) -> list[Table]:
        return tables(results, self.config(results.quick))

    def draw(self, results: Results) -> dict[str, Figure]:
        return {"": figures.draw_completion(results, self.config(results.quick))}


def problem(config: dict[str, Any], context: Context) -> Observed:
    """A random matrix of low rank, mean square 1, with nested sets of observed entries."""
    source = generator(context.seed)
    size = config["size"]
    rank = config["rank"]
    left, right = (normal(shape, source, context.device) for shape in ((size, rank), (rank, size)))
    truth = left @ right
    return Observed.of(truth * (size / truth.norm()), config["counts"], source)


def _factors(depth: int, times: int, start: float, size: int, context: Context) -> list[Tensor]:
    """L factors, each a product of `times` Gaussian ones, scaled to ‖β‖_F = start·√size."""
    source = generator(10_000 + context.seed)
    out = []
    for _ in range(depth):
        w = product([normal((size, size), source, context.device) for _ in range(times)])
        out.append(w * (start ** (1 / depth) * size**0.5 / w.norm()))
    scale = (start * size**0.5 / product(out).norm()) ** (1 / depth)
    return [w * scale for w in out]


def _euclidean(depth: int, times: int, config: dict[str, Any], context: Context) -> Record:
    data = problem(config, context)
    start = _factors(depth, times, config["start"], config["size"], context)
    factors = [w.expand(len(data.mask), *w.shape) for w in start]
    steps = config["steps"]
    descent = descend(factors, data, steps=steps, watch=lambda i: context.watch(i / steps, "steps"))
    return _measure_matrices(product(descent), data)


def _natural(depth: int, config: dict[str, Any], context: Context) -> Record:
    """Descend with F(β) = 1, as in the paper, and with its split (1/L)A⁺∇B⁺."""
    data = problem(config, context)
    out = []
    steps = []
    start = _factors(depth, 1, 1.0, config["size"], context)
    for truth, mask in zip(data.truth, data.mask, strict=True):
        model = DeepMatrix.of(start)
        steps_taken = 0
        for _ in range(100):
            gap = (model.beta.detach() - truth).masked_fill(~mask, 0.0)
            try:
                moves = model.split_natural_gradient(gap)
            except PullbackError:  # a product of factors lost its rank: the formula ends there
                break
            # a step moves no factor by more than a tenth of itself
            pairs = zip(moves, model.factors, strict=True)
            sizes = [float(move.norm() / w.detach().norm()) for move, w in pairs]
            if depth > 1:
                lr = min(0.2, 0.1 / max(sizes))
            else:
                lr = 0.2
            with torch.no_grad():
                for w, move in zip(model.factors, moves, strict=True):
                    w -= lr * move
            steps_taken += 1
        out.append(model.beta.detach())
        steps.append(steps_taken)
    return _measure_matrices(torch.stack(out), data) | {
        "steps": steps,
        "moved": _compare_moves(torch.stack(out) - product(start), data),
    }


def _compare_moves(change: Tensor, data: Observed) -> list[float]:
    """‖Δβ‖ off the observed entries over ‖Δβ‖ on them, as root mean squares."""
    square = change.square()
    off = (square * ~data.mask).sum((1, 2)) / (~data.mask).sum((1, 2))
    on = (square * data.mask).sum((1, 2)) / data.mask.sum((1, 2))
    return (off / on).sqrt().tolist()


def _nuclear(config: dict[str, Any], context: Context) -> Record:
    data = problem(config, context)
    size = config["size"]
    norms = []
    for truth, mask in zip(data.truth, data.mask, strict=True):
        rows, columns = mask.nonzero().T
        completion = nuclear_norm_completion((size, size), rows, columns, truth[mask], tol=1e-3)
        norms.append(completion.matrix)
    return _measure_matrices(torch.stack(norms), data)


def _measure_matrices(beta: Tensor, data: Observed) -> Record:
    return {
        "error": data.error(beta).tolist(),
        "training": data.training(beta).tolist(),
        "rank": effective_rank(beta).tolist(),
        "norm": torch.linalg.matrix_norm(beta, "nuc").tolist(),
    }


def medians(results: Results, *key: str, name: str = "error") -> np.ndarray:
    """Return medians over seeds, by number of observations."""
    return np.median([r[name] for r in results.of(*key)], 0)


def claims(results: Results, config: dict[str, Any]) -> list[Claim]:
    """Return the checks of Figure 5's caption, and of the search."""
    depths = config["depths"]
    deep = {d: medians(results, "EGD", f"L={d}") for d in depths if d > 1}
    direct = medians(results, "EGD", "L=1")
    natural = np.array([medians(results, "NGD", f"L={d}") for d in depths])
    ranks = [medians(results, "EGD", f"L={d}", name="rank")[-1] for d in deep]
    most = max(e[-1] for e in deep.values())
    return [
        (
            "EGD with L ≥ 2 completes the matrix from enough entries",
            bool(most < 0.05 and max(ranks) < 2 * config["rank"]),
            f"errors at most {most:.1g}, effective rank at most {max(ranks):.1f}",
        ),
        _claim_sooner(results, deep, config),
        (
            "EGD with L = 1 leaves what is not observed",
            bool(direct.min() > 0.99),
            f"errors at least {direct.min():.2f}",
        ),
        (
            "NGD at any depth works like EGD with L = 1, and does not complete",
            bool(natural.min() > 0.9),
            f"errors {natural.min():.2f} to {natural.max():.2f}",
        ),
        _claim_control(results, deep),
        _claim_search(results, 0, False),
        _claim_search(results, 1, False),
        _claim_damped(results),
    ]


def _claim_sooner(results: Results, deep: dict[int, np.ndarray], config: dict[str, Any]) -> Claim:
    nuclear = medians(results, "nuclear norm")

    def count_needed(errors: np.ndarray) -> float:
        enough = [n for n, e in zip(config["counts"], errors, strict=True) if e < 0.1]
        if enough:
            return float(enough[0])
        return float("inf")

    counts = {f"L = {d}": count_needed(e) for d, e in deep.items()}
    counts["nuclear norm"] = count_needed(nuclear)
    words = ", ".join(f"{name} {n:g}" for name, n in counts.items())
    holds = min(count_needed(e) for d, e in deep.items() if d > 2) < count_needed(nuclear)
    return "deep EGD needs fewer entries than the nuclear norm", holds, f"error < 0.1 from {words}"


def _claim_control(results: Results, deep: dict[int, np.ndarray]) -> Claim:
    """Compare how far start and depth move the errors."""
    gaps = [
        float(np.abs(medians(results, "EGD, collapsed start", f"L={d}") - deep[d]).mean())
        for d in (2, 3)
    ]
    effect = [float((1 - deep[d]).mean()) for d in (2, 3)]
    words = f"{gaps[0]:.2f} and {gaps[1]:.2f} on average"
    words += f", the dynamics {effect[0]:.2f} and {effect[1]:.2f}"
    holds = all(g < 0.25 * e for g, e in zip(gaps, effect, strict=True))
    return "a start collapsed from deeper models changes little", holds, words


def find_best_error(results: Results, fisher: str, damped: bool) -> float:
    """Return the least error of trials that fit the observations, median over seeds."""

    def of(record: Any) -> float:
        records = [
            t["error"]
            for t in record["trials"]
            if t["fisher"] == fisher
            and (t["damping"] > 0) == damped
            and t["error"] is not None
            and t["training"] < 0.1
        ]
        return min(records, default=float("inf"))

    return float(np.median([of(r) for r in results.of("search")]))


def _format_euclidean(results: Results) -> str:
    euclidean = np.median([r["euclidean"] for r in results.of("search")], 0)
    return f"EGD {euclidean[0]:.2g} (L = 2) and {euclidean[1]:.2g} (L = 3)"


def _claim_search(results: Results, which: int, damped: bool) -> Claim:
    error = find_best_error(results, FISHERS[which], damped)
    claim = f"no setting of undamped NGD, Fisher matrix of {FISHERS[which]}, completes"
    return claim, error > 0.8, f"best error {error:.2g}; {_format_euclidean(results)}"


def _claim_damped(results: Results) -> Claim:
    errors = [find_best_error(results, f, True) for f in FISHERS]
    words = f"best error {errors[0]:.2g} (all entries) and {errors[1]:.2g} (observed ones)"
    return "nor of damped NGD", min(errors) > 0.8, f"{words}; {_format_euclidean(results)}"


def tables(results: Results, config: dict[str, Any]) -> list[Table]:
    """Return the tables of errors and of effective ranks."""
    keys: list[tuple[str, tuple[str, ...]]] = [
        (f"EGD, L = {d}", ("EGD", f"L={d}")) for d in config["depths"]
    ]
    collapsed = config["collapsed"]
    keys += [
        (f"EGD, L = {d}, start of {collapsed}", ("EGD, collapsed start", f"L={d}")) for d in (2, 3)
    ]
    keys += [(f"NGD, L = {d}", ("NGD", f"L={d}")) for d in config["depths"]]
    keys.append(("nuclear norm", ("nuclear norm",)))
    columns = ["method", *(str(n) for n in config["counts"])]
    over = f"by number of observations, medians over {len(results.seeds)} seeds"
    titles = {
        "error": f"Relative error on unobserved entries, {over}",
        "rank": f"Effective rank, {over}",
    }
    out = []
    for what, title in titles.items():
        rows = [[name, *medians(results, *key, name=what).tolist()] for name, key in keys]
        out.append(Table(columns, rows, title))
    return out
