"""Laplace posteriors of small regressions beside laplace-torch, on the same trained networks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

import pullback as pb
from pullback.curvature import Prediction
from pullback.likelihoods import Gaussian

from ...framework.check import Check
from ...framework.experiment import Context, Experiment, Item
from ...framework.store import Results
from ...framework.tabular import Table
from ...learning import data
from .posteriors import fit_peer, fit_posterior
from .reports import (
    Report,
    compare_with_peer,
    report_regression,
)
from .tasks import GENERATED, Split, load_split, train

OURS: dict[str, tuple[str, str | None]] = {
    "pullback EK-FAC": ("ekfac", None),
    "pullback K-FAC": ("kfac", None),
    "pullback exact": ("exact", None),
    "pullback last layer": ("exact", "last layer"),
}
#: prior precisions among which the best on the test data is looked for
PRIORS = tuple(10.0**exponent for exponent in range(-4, 5))
THEIRS: dict[str, tuple[str, str]] = {
    "laplace-torch Kronecker": ("kron", "all"),
    "laplace-torch full": ("full", "all"),
    "laplace-torch last layer": ("full", "last_layer"),
}


def compare_regression(name: str, number: int, epochs: int, context: Context) -> dict[str, Any]:
    """Train one network on a split, and return what every posterior says of the test data."""
    split = load_split(name, number)
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(split.x.shape[1], 50), nn.Tanh(), nn.Linear(50, 1)).double()
    train(model, split, F.mse_loss, epochs, 1e-4, 64)
    with torch.no_grad():
        mean = model(split.test_x)
        noise = F.mse_loss(model(split.x), split.y)
    plain = report_regression(mean, noise.expand_as(mean), split.test_y)
    reports = {"plain network": vars(plain)}
    for label, (structure, layers) in OURS.items():
        reports[label] = compare_ours(model, split, structure, layers)
    if find_spec("laplace") is not None:
        for label, (structure, layers) in THEIRS.items():
            reports[label] = compare_peer(model, split, structure, layers)
    return {"reports": reports, "samples": len(split.x)}


def compare_ours(
    model: nn.Module, split: Split, structure: str, layers: str | None
) -> dict[str, Any]:
    """Return our report on a trained network."""
    start = time.monotonic()
    posterior = fit_posterior(model, split, Gaussian(), structure, layers)
    report = report_posterior(posterior, split)
    seconds = time.monotonic() - start
    trials = [report_posterior(replace(posterior, prior_precision=p), split) for p in PRIORS]
    return vars(
        replace(
            report,
            marginal_likelihood=posterior.log_marginal_likelihood() / len(split.x),
            prior_precision=posterior.prior_precision,
            best_prior_nll=min(trial.nll for trial in trials),
            seconds=seconds,
        )
    )


def report_posterior(posterior: pb.curvature.Posterior, split: Split) -> Report:
    """Return what a posterior of a regression says of the test data."""
    prediction: Prediction = posterior(split.test_x)
    spread = prediction.variance + (posterior.noise or 0.0)
    return report_regression(prediction.mean, spread, split.test_y)


def compare_peer(model: nn.Module, split: Split, structure: str, layers: str) -> dict[str, Any]:
    """Return laplace-torch's report on the same network, or why there is none."""
    start = time.monotonic()
    try:
        peer = fit_peer(model, split, "regression", structure, layers)
        mean, variance = peer(split.test_x)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    spread = variance.reshape(mean.shape).detach() + peer.sigma_noise.detach() ** 2
    seconds = time.monotonic() - start
    scores = report_regression(mean.detach(), spread, split.test_y)
    evidence = float(peer.log_marginal_likelihood().detach()) / len(split.x)
    return vars(replace(scores, marginal_likelihood=evidence, seconds=seconds))


#: our posteriors, and those of laplace-torch that stand for the same matrix
PEERS = {
    "pullback EK-FAC": "laplace-torch Kronecker",
    "pullback exact": "laplace-torch full",
    "pullback last layer": "laplace-torch last layer",
}


@dataclass(frozen=True, kw_only=True)
class LaplaceRegression(Experiment):
    """UCI sets with one hidden layer.

    Attributes:
        sets: names in the file of data.
        splits: the first so many standard splits.
        epochs: of training.
    """

    sets: Sequence[str] = ("bostonHousing", "concrete", "energy", "wine_quality_red", "yacht")
    splits: int = 3
    epochs: int = 100
    seeds: Sequence[int] = (0,)

    def smoke(self) -> Self:
        return replace(self, judged=False, sets=(GENERATED,), splits=1, epochs=1)

    def config(self, quick: bool) -> dict[str, Any]:
        return {"sets": list(self.sets), "splits": self._splits(quick), "epochs": self.epochs,
                "network": "50 units, tanh, Adam 0.01, weight decay 1e-4"}  # fmt: skip

    def _splits(self, quick: bool) -> int:
        return min(self.splits, 2) if quick else self.splits

    def items(self, quick: bool) -> list[Item]:
        items = []
        for name in self.sets:
            for number in range(self._splits(quick)):
                work = partial(compare_regression, name, number, self.epochs)
                items.append(Item((name, str(number)), work))
        return items

    def require_data(self, quick: bool) -> None:
        if GENERATED not in self.sets:
            data.file("uci_bnn9.npz")

    def means(self, results: Results, name: str) -> dict[str, dict[str, float]]:
        """Return the mean numbers of every method over the splits of a set."""
        numbers = range(self._splits(results.quick))
        records = [results.of(name, str(number))[0]["reports"] for number in numbers]
        methods = [key for key in records[0] if all("nll" in record[key] for record in records)]
        return {method: _mean_report([record[method] for record in records]) for method in methods}

    def judge(self, results: Results) -> list[Check]:
        checks = []
        for name in self.sets:
            means = self.means(results, name)
            exact = means["pullback exact"]
            chosen = exact["nll"]
            best = exact["best_prior_nll"]
            checks.append(
                Check(f"{name}: the marginal likelihood's prior is near the best one",
                      chosen <= best + 0.05, f"{chosen:.3f}, {best:.3f}", of_paper=False)
            )  # fmt: skip
            for ours, theirs in PEERS.items():
                if theirs in means:
                    checks.append(compare_with_peer(name, ours, means[ours], means[theirs]))
        return checks

    def tables(self, results: Results) -> list[Table]:
        columns = ["method", "negative log-likelihood", "calibration error",
                   "log marginal likelihood per sample", "prior precision",
                   "NLL of the best prior"]  # fmt: skip
        tables = []
        for name in self.sets:
            rows = []
            for method, means in self.means(results, name).items():
                numbers = [means["nll"], means["calibration"], means.get("marginal_likelihood"),
                           means.get("prior_precision"), means.get("best_prior_nll")]  # fmt: skip
                rows.append([method, *numbers])
            tables.append(Table(columns, rows, name))
        return tables


def _mean_report(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    keys = [key for key, value in reports[0].items() if value is not None]
    return {key: sum(report[key] for report in reports) / len(reports) for key in keys}
