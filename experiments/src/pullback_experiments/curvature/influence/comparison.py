"""What the experiments that retrain on halves share: methods, their scores, checks, a figure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from pullback.curvature import Relative

from ...framework import plots
from ...framework.check import Check
from ...framework.experiment import Context
from ...framework.tabular import Table
from ..retraining.halves import MULTIPLES, ExplainedModel, Halves
from ..retraining.scores import trak

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: a method by its name: it gives scores (queries, samples) of one or several networks
Methods = dict[str, Callable[[], Tensor]]
#: peers that explain one network too
ONE_MODEL_PEERS = ("gradient dot product", "TRAK, 1 model")


def list_trak(
    models: Sequence[nn.Module],
    queries: tuple[Tensor, Tensor],
    training: tuple[Tensor, Tensor],
    dimension: int,
) -> Methods:
    """Return TRAK with the first network and with all of them."""

    def attribute(count: int) -> Tensor:
        return trak(models[:count], queries, training, dimension, seed=0, batch=250)

    return {
        "TRAK, 1 model": partial(attribute, 1),
        f"TRAK, {len(models)} models": partial(attribute, len(models)),
    }


def judge_methods(
    methods: Methods, halves: Halves, context: Context
) -> dict[str, dict[str, float]]:
    """Return the datamodeling score and the seconds of every method, as `scores` and `seconds`."""
    scores = {}
    seconds = {}
    for name, method in methods.items():
        start = time.monotonic()
        scores[name] = halves.score(method())
        seconds[name] = time.monotonic() - start
        context.watch(0.9, f"{name} {scores[name]:.3f}")
    return {"scores": scores, "seconds": seconds}


def judge_dampings(explained: ExplainedModel, halves: Halves) -> dict[str, float]:
    """Return the datamodeling score for every multiple of each block's mean eigenvalue."""
    return {f"{k:g}": halves.score(explained.score(Relative(k))) for k in MULTIPLES}


def tabulate_dampings(by_damping: Mapping[str, float]) -> Table:
    """Return the scores of `judge_dampings` as a table."""
    rows = [[multiple, score] for multiple, score in by_damping.items()]
    columns = ["multiple of the mean eigenvalue", "score"]
    return Table(columns, rows, "EK-FAC by relative damping")


def check_lead(scores: Mapping[str, float]) -> Check:
    """Return whether EK-FAC of one network is ahead of its peers."""
    score = scores["EK-FAC"]
    best_peer = max(scores[name] for name in ONE_MODEL_PEERS)
    numbers = f"{score:.3f}, {best_peer:.3f}"
    return Check("EK-FAC is ahead of one-model scores", score > best_peer, numbers, of_paper=False)


def check_scores(scores: Mapping[str, float], aim: float) -> list[Check]:
    """Return whether EK-FAC of one network reaches the aim and is ahead of its peers."""
    score = scores["EK-FAC"]
    reaches = Check(f"one model reaches {aim:g}", score >= aim, f"{score:.3f}", of_paper=False)
    return [reaches, check_lead(scores)]


def draw_scores(scores: Mapping[str, float], title: str) -> Figure:
    """Return bars of the scores, the best at the top."""
    figure = plots.make_figure(6, 0.8 + 0.3 * len(scores), f"Linear datamodeling score, {title}")
    axes = figure.subplots()
    names = sorted(scores, key=lambda name: scores[name])
    axes.barh(names, [scores[name] for name in names], color=plots.PALETTE[0])
    axes.set_xlabel("rank correlation with retraining")
    return figure
