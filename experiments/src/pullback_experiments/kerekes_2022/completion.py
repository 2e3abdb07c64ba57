"""Figure 5: completing a rank-5 matrix by EGD and NGD at several depths, and by nuclear norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from pullback import PullbackError
from pullback.linear import DeepMatrix
from pullback.linear.solutions import nuclear_norm_completion

from ..framework.check import Check, recorded
from ..framework.curves import Chart
from ..framework.experiment import Context, Item
from ..framework.plain import Record
from ..framework.results import Results
from ..framework.tabular import Table
from . import charts
from .common import Repeated, generator, normal
from .completion_claims import claims, tables
from .factorization import Observed, descend, effective_rank, product
from .search import search

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
        held: which claims held in the full runs.
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
    held: Sequence[bool] = (True,) * 6 + (False,) * 2

    def config(self, quick: bool) -> dict[str, Any]:
        sizes = (self.size, self.rank, tuple(self.counts), tuple(self.depths))
        size, rank, counts, depths = self.small if quick else sizes
        return {
            "size": size,
            "rank": rank,
            "counts": list(counts),
            "depths": list(depths),
            "start": self.start,
            "steps": min(self.steps, 2000) if quick else self.steps,
            "collapsed": self.collapsed,
            "trials": min(self.trials, 12) if quick else self.trials,
        }

    def smoke(self) -> Self:
        small = (8, 1, (30, 50), (1, 2, 3))
        return replace(self, judged=False, small=small, steps=100, trials=1)

    def items(self, quick: bool) -> list[Item]:
        config, out = self.config(quick), []
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
        found = claims(results, self.config(results.quick))
        # small sizes show the same, less clearly: only the full version says so of the paper
        return [] if results.quick else recorded(found, self.held, ours={6, 7})

    def curves(self, results: Results) -> list[Chart]:
        return charts.completion(results, self.config(results.quick))

    def tables(self, results: Results) -> list[Table]:
        return tables(results, self.config(results.quick))

    def draw(self, results: Results) -> dict[str, Figure]:
        from .draw_completion import draw

        return {"": draw(results, self.config(results.quick))}


def problem(config: dict[str, Any], context: Context) -> Observed:
    """A random matrix of low rank, mean square 1, with nested sets of observed entries."""
    source, size, rank = generator(context.seed), config["size"], config["rank"]
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
    done = descend(factors, data, steps=steps, watch=lambda i: context.watch(i / steps, "steps"))
    return _measured(product(done), data)


def _natural(depth: int, config: dict[str, Any], context: Context) -> Record:
    """F(β) = 1 as in the paper, and its split (1/L)A⁺∇B⁺; step sizes fall where factors do not."""
    data, out, steps = problem(config, context), [], []
    start = _factors(depth, 1, 1.0, config["size"], context)
    for truth, mask in zip(data.truth, data.mask, strict=True):
        model, taken = DeepMatrix.of(start), 0
        for _ in range(100):
            gap = (model.beta.detach() - truth).masked_fill(~mask, 0.0)
            try:
                moves = model.split_natural_gradient(gap)
            except PullbackError:  # a product of factors lost its rank: the formula ends there
                break
            # a step moves no factor by more than a tenth of itself
            pairs = zip(moves, model.factors, strict=True)
            sizes = [float(move.norm() / w.detach().norm()) for move, w in pairs]
            lr = min(0.2, 0.1 / max(sizes)) if depth > 1 else 0.2
            with torch.no_grad():
                for w, move in zip(model.factors, moves, strict=True):
                    w -= lr * move
            taken += 1
        out.append(model.beta.detach())
        steps.append(taken)
    return _measured(torch.stack(out), data) | {
        "steps": steps,
        "moved": _moved(torch.stack(out) - product(start), data),
    }


def _moved(change: Tensor, data: Observed) -> list[float]:
    """‖Δβ‖ off the observed entries over ‖Δβ‖ on them, as root mean squares."""
    square = change.square()
    off = (square * ~data.mask).sum((1, 2)) / (~data.mask).sum((1, 2))
    on = (square * data.mask).sum((1, 2)) / data.mask.sum((1, 2))
    return (off / on).sqrt().tolist()


def _nuclear(config: dict[str, Any], context: Context) -> Record:
    data, size, found = problem(config, context), config["size"], []
    for truth, mask in zip(data.truth, data.mask, strict=True):
        rows, columns = mask.nonzero().T
        done = nuclear_norm_completion((size, size), rows, columns, truth[mask], tol=1e-3)
        found.append(done.matrix)
    return _measured(torch.stack(found), data)


def _measured(beta: Tensor, data: Observed) -> Record:
    return {
        "error": data.error(beta).tolist(),
        "training": data.training(beta).tolist(),
        "rank": effective_rank(beta).tolist(),
        "norm": torch.linalg.matrix_norm(beta, "nuc").tolist(),
    }
