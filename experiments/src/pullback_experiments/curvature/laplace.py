"""Laplace posteriors beside laplace-torch, on the same trained networks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.curvature import Prediction
from pullback.likelihoods import Categorical, Gaussian, Likelihood

from ..framework.check import Check
from ..framework.experiment import Context, Experiment, Item
from ..framework.store import Results
from ..framework.tabular import Table
from ..learning import data
from ..learning.networks import convnet

#: central intervals whose coverage is held against their level
LEVELS = tuple(k / 10 for k in range(1, 10))


@dataclass(frozen=True)
class Split:
    """Training and test samples of one task."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


GENERATED = "generated"


def generate_split() -> Split:
    """Return a noisy sine of two inputs."""
    x = torch.randn(80, 2, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(80, 1)
    return Split(x[:60], y[:60], x[60:], y[60:])


def load_split(name: str, number: int) -> Split:
    """Return a standard split of a UCI set, with inputs and targets of mean 0 and variance 1."""
    if name == GENERATED:
        return generate_split()
    with np.load(data.file("uci_bnn9.npz")) as arrays:
        x = torch.from_numpy(arrays[f"{name}__x"]).double()
        y = torch.from_numpy(arrays[f"{name}__y"]).double().reshape(len(x), 1)
        test = torch.from_numpy(np.asarray(arrays[f"{name}__test_idx"][number])).long()
    is_test = torch.zeros(len(x), dtype=torch.bool)
    is_test[test[test >= 0]] = True
    x = (x - x[~is_test].mean(0)) / x[~is_test].std(0).clamp(min=1e-8)
    y = (y - y[~is_test].mean(0)) / y[~is_test].std(0)
    return Split(x[~is_test], y[~is_test], x[is_test], y[is_test])


def train(
    model: nn.Module,
    split: Split,
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    decay: float,
    batch: int,
) -> None:
    """Train with Adam, whose rate falls along half a cosine; `decay` is that of the mean loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=decay)
    steps = epochs * math.ceil(len(split.x) / batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(split.x)).split(batch):
            optimizer.zero_grad()
            loss(model(split.x[chosen]), split.y[chosen]).backward()
            optimizer.step()
            scheduler.step()
    model.eval()


@dataclass(frozen=True)
class Report:
    """What a posterior says of test data.

    Attributes:
        nll: mean of −log p(y|x).
        calibration: expected calibration error, or mean gap of coverage in regression.
        marginal_likelihood: log p(D) per training sample.
        prior_precision: the one that maximizes it.
        best_prior_nll: the smallest NLL over a grid of prior precisions, seen on the test data.
        seconds: to fit, to choose the prior and to predict.
    """

    nll: float
    calibration: float
    marginal_likelihood: float | None = None
    prior_precision: float | None = None
    best_prior_nll: float | None = None
    seconds: float | None = None


def report_regression(mean: Tensor, variance: Tensor, targets: Tensor) -> Report:
    """Return the mean negative log-density, and the mean gap of coverage over nine levels."""
    normal = torch.distributions.Normal(mean, variance.sqrt())
    quantiles = normal.cdf(targets)
    gaps = []
    for level in LEVELS:
        is_inside = (quantiles - 0.5).abs() <= level / 2
        gaps.append(abs(float(is_inside.double().mean()) - level))
    return Report(-float(normal.log_prob(targets).mean()), sum(gaps) / len(gaps))


def report_classification(probabilities: Tensor, targets: Tensor, bins: int = 10) -> Report:
    """Return the mean negative log-probability and the expected calibration error."""
    chosen = probabilities.gather(1, targets[:, None]).clamp(min=1e-30)
    confidence, predicted = probabilities.max(1)
    is_right = (predicted == targets).double()
    error = 0.0
    edges = torch.linspace(0, 1, bins + 1)
    for low, high in pairwise(edges.tolist()):
        is_inside = (confidence > low) & (confidence <= high)
        if bool(is_inside.any()):
            gap = float(is_right[is_inside].mean() - confidence[is_inside].mean())
            error += abs(gap) * float(is_inside.double().mean())
    return Report(-float(chosen.log().mean()), error)


def fit_posterior(
    model: nn.Module, split: Split, likelihood: Likelihood, structure: str, layers: str | None
) -> pb.curvature.Posterior:
    """Return our posterior with prior and noise by the marginal likelihood."""
    curvature = pb.curvature.fit(
        model, (split.x, split.y), likelihood=likelihood, structure=structure, parameters=layers
    )
    return pb.curvature.laplace(curvature, prior_precision="marginal likelihood")


def fit_peer(model: nn.Module, split: Split, task: str, structure: str, layers: str) -> Any:
    """Return laplace-torch's posterior, tuned as its documentation does: 100 steps of Adam."""
    from laplace import Laplace  # pyright: ignore

    pairs = torch.utils.data.TensorDataset(split.x, split.y)
    loader = torch.utils.data.DataLoader(pairs, batch_size=256)
    peer = Laplace(model, task, subset_of_weights=layers, hessian_structure=structure)
    peer.fit(loader)
    log_prior = torch.zeros(1, requires_grad=True)
    log_noise = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_noise], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        noise = log_noise.exp() if task == "regression" else None
        (-peer.log_marginal_likelihood(log_prior.exp(), noise)).backward()
        optimizer.step()
    return peer


OURS: dict[str, tuple[str, str | None]] = {
    "pullback EK-FAC": ("ekfac", None),
    "pullback K-FAC": ("kfac", None),
    "pullback exact": ("exact", None),
    "pullback last layer": ("exact", "last layer"),
}
#: for images: the last layer has thousands of parameters, whose dense matrix takes minutes
OURS_ON_IMAGES: dict[str, tuple[str, str | None]] = {
    "pullback EK-FAC": ("ekfac", None),
    "pullback last layer": ("ekfac", "last layer"),
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
                    checks.append(_compare(name, ours, means[ours], means[theirs]))
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


def _compare(
    name: str,
    method: str,
    ours: dict[str, float],
    theirs: dict[str, float],
    *,
    recorded: bool = True,
) -> Check:
    """Return whether NLL and calibration error are not worse than the peer's, up to rounding."""
    is_likely = ours["nll"] <= theirs["nll"] + 0.01
    is_calibrated = ours["calibration"] <= theirs["calibration"] + 0.01
    words = (
        f"NLL {ours['nll']:.3f} against {theirs['nll']:.3f}, "
        f"calibration {ours['calibration']:.3f} against {theirs['calibration']:.3f}"
    )
    claim = f"{name}: {method} is not worse than laplace-torch"
    return Check(claim, is_likely and is_calibrated, words, recorded, of_paper=False)


def _mean_report(reports: Sequence[dict[str, Any]]) -> dict[str, float]:
    keys = [key for key, value in reports[0].items() if value is not None]
    return {key: sum(report[key] for report in reports) / len(reports) for key in keys}


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Return images (N, 1, H, W) turned by an angle."""
    angle = math.radians(degrees)
    matrix = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    )
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


class TextOfRows(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 32, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Read (N, 1, 28, 28) and return (N, 10)."""
        return self.head(self.lstm(x[:, 0])[0][:, -1])


def make_normalized() -> nn.Module:
    """Return a small convolutional network with batch and layer normalization."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.LayerNorm(392), nn.Linear(392, 10),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutional": partial(convnet, 28),
    "normalized": make_normalized,
    "LSTM": TextOfRows,
}


#: networks that laplace-torch has a posterior for; it is K-FAC, without EK-FAC's eigenvalues
PEER_NETWORKS = ("convolutional",)
#: methods and angles at which the record is behind laplace-torch, by 0.03 in the NLL
WORSE_THAN_PEER = {("pullback EK-FAC", "60.0")}


@dataclass(frozen=True, kw_only=True)
class LaplaceRotation(Experiment):
    """Fashion-MNIST with rotation as shift, for networks with and without normalizations.

    Attributes:
        networks: names in `NETWORKS`.
        samples, tests: images.
        angles: degrees.
        epochs: of training.
        is_generated: whether the images are made up instead.
    """

    networks: Sequence[str] = tuple(NETWORKS)
    samples: int = 2000
    tests: int = 500
    angles: Sequence[float] = (0.0, 30.0, 60.0)
    epochs: int = 12
    seeds: Sequence[int] = (0, 1, 2)
    quick_seeds: Sequence[int] = (0,)
    is_generated: bool = False

    def smoke(self) -> Self:
        small = replace(self, samples=60, tests=10, epochs=1, is_generated=True)
        return replace(small, judged=False, networks=("normalized",))

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "networks": list(self.networks),
            "samples": self._reduce_if_quick(quick).samples,
            "tests": self._reduce_if_quick(quick).tests,
            "angles": list(self.angles),
            "epochs": self.epochs,
        }

    def _reduce_if_quick(self, quick: bool) -> Self:
        if not quick:
            return self
        return replace(self, samples=min(self.samples, 500), tests=min(self.tests, 50))

    def items(self, quick: bool) -> list[Item]:
        sized = self._reduce_if_quick(quick)
        items = []
        for name in self.networks:
            items.append(Item((name,), partial(compare_rotation, sized, name)))
            if name in PEER_NETWORKS:
                items.append(Item((name, "K-FAC"), partial(compare_kfac_rotation, sized, name)))
            for angle in self.angles:
                work = partial(compare_peer_rotation, sized, name, angle)
                items.append(Item((name, "laplace-torch", str(angle)), work))
        return items

    def reports(self, results: Results, name: str) -> dict[str, Any]:
        """Return the reports on a network by method and angle, as means over seeds.

        A refusal is an `error`.
        """
        reports = average_reports([record["reports"] for record in results.of(name)])
        if name in PEER_NETWORKS:
            reports["pullback K-FAC"] = average_reports(results.of(name, "K-FAC"))
        peer: dict[str, Any] = {}
        for angle in map(str, self.angles):
            peer.update(average_reports(results.of(name, "laplace-torch", angle)))
        if peer:
            reports["laplace-torch Kronecker"] = peer
        return reports

    def require_data(self, quick: bool) -> None:
        if not self.is_generated:
            data.file("fashion_mnist.npz")

    def judge(self, results: Results) -> list[Check]:
        checks = []
        for name in self.networks:
            reports = self.reports(results, name)
            plain = reports["plain network"][str(self.angles[-1])]["nll"]
            ours = reports["pullback EK-FAC"][str(self.angles[-1])]["nll"]
            words = f"{ours:.3f} against {plain:.3f}"
            claim = f"{name}: better than the plain network on turned images"
            checks.append(Check(claim, ours <= plain, words, of_paper=False))
            checks += self._compare_peer(name, reports)
        return checks

    def _compare_peer(self, name: str, reports: dict[str, Any]) -> list[Check]:
        """Return one check per angle, or that laplace-torch has no posterior of this network."""
        theirs = reports.get("laplace-torch Kronecker")
        if theirs is None:
            return []
        if "error" in theirs:
            claim = f"{name}: a posterior where laplace-torch refuses"
            return [Check(claim, True, theirs["error"], of_paper=False)]
        checks = []
        for method in ("pullback K-FAC", "pullback EK-FAC"):
            for angle in map(str, self.angles):
                ours = reports[method][angle]
                recorded = (method, angle) not in WORSE_THAN_PEER
                label = f"{name}, {angle}°"
                checks.append(_compare(label, method, ours, theirs[angle], recorded=recorded))
        return checks

    def tables(self, results: Results) -> list[Table]:
        tables = []
        for name in self.networks:
            reports = self.reports(results, name)
            columns = ["method"]
            for angle in self.angles:
                columns += [f"NLL at {angle:g}°", f"calibration error at {angle:g}°"]
            rows = []
            for method, by_angle in reports.items():
                cells: list[Any] = [method]
                for angle in self.angles:
                    report = by_angle.get(str(angle), {})
                    cells += [report.get("nll"), report.get("calibration")]
                rows.append(cells)
            tables.append(Table(columns, rows, name))
        return tables


def average_reports(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of every number of equally nested reports; other values are the first's."""
    means: dict[str, Any] = {}
    for key, first in reports[0].items():
        values = [report[key] for report in reports]
        if isinstance(first, dict):
            means[key] = average_reports(values)
        elif isinstance(first, float):
            means[key] = sum(values) / len(values)
        else:
            means[key] = first
    return means


@dataclass(frozen=True)
class TurnedTask:
    """A trained network, its data, and test images turned by each angle."""

    model: nn.Module
    split: Split
    rotated: dict[str, Tensor]

    @classmethod
    def make(cls, setting: LaplaceRotation, name: str, seed: int) -> TurnedTask:
        """Return the network of a name after training; the same one for the same seed."""
        if setting.is_generated:
            images = data.generate_pictures((1, 28, 28), 10, setting.samples)
        else:
            images = data.fashion_mnist()
        images = images.first(setting.samples, setting.tests)
        split = Split(images.x, images.y, images.test_x, images.test_y)
        torch.manual_seed(seed)
        model = NETWORKS[name]()
        train(model, split, F.cross_entropy, setting.epochs, 1e-4, 64)
        rotated = {str(angle): rotate(split.test_x, angle) for angle in setting.angles}
        return cls(model, split, rotated)


def compare_rotation(setting: LaplaceRotation, name: str, context: Context) -> dict[str, Any]:
    """Return what the plain network and our posteriors say of turned test images."""
    task = TurnedTask.make(setting, name, context.seed)
    targets = task.split.test_y
    reports: dict[str, Any] = {"plain network": {}}
    for angle, x in task.rotated.items():
        with torch.no_grad():
            p = torch.softmax(task.model(x), 1)
        reports["plain network"][angle] = vars(report_classification(p, targets))
    for label, (structure, layers) in OURS_ON_IMAGES.items():
        reports[label] = report_rotation(task, structure, layers)
    return {"reports": reports}


def compare_kfac_rotation(setting: LaplaceRotation, name: str, context: Context) -> dict[str, Any]:
    """Return what the posterior of Kronecker factors alone says of turned test images."""
    return report_rotation(TurnedTask.make(setting, name, context.seed), "kfac", None)


def report_rotation(task: TurnedTask, structure: str, layers: str | None) -> dict[str, Any]:
    """Return our posterior's report for every angle, its evidence and its seconds."""
    start = time.monotonic()
    posterior = fit_posterior(task.model, task.split, Categorical(), structure, layers)
    report: dict[str, Any] = {
        "marginal likelihood": posterior.log_marginal_likelihood(),
        "prior precision": posterior.prior_precision,
    }
    for angle, x in task.rotated.items():
        p = posterior(x).probabilities()
        report[angle] = vars(report_classification(p, task.split.test_y))
    report["seconds"] = time.monotonic() - start
    return report


def compare_peer_rotation(
    setting: LaplaceRotation, name: str, angle: float, context: Context
) -> dict[str, Any]:
    """Return laplace-torch's report for one angle, by its name; or the error of its refusal.

    Empty where it is not installed.
    """
    if find_spec("laplace") is None:
        return {}
    task = TurnedTask.make(setting, name, context.seed)
    start = time.monotonic()
    try:
        peer = fit_peer(task.model, task.split, "classification", "kron", "all")
        panels = task.rotated[str(angle)].split(100)
        p = torch.cat([peer(panel, link_approx="probit").detach() for panel in panels])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    report = report_classification(p, task.split.test_y)
    evidence = float(peer.log_marginal_likelihood().detach())
    return {
        str(angle): vars(replace(report, seconds=time.monotonic() - start)),
        "marginal likelihood": evidence,
    }
