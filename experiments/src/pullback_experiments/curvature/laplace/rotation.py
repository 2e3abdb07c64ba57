"""Laplace posteriors of image classifiers under rotation, beside laplace-torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.likelihoods import Categorical

from ...framework.check import Check
from ...framework.experiment import Context, Experiment, Item
from ...framework.store import Results
from ...framework.tabular import Table
from ...learning import data
from ...learning.networks import convnet
from .posteriors import fit_peer, fit_posterior
from .reports import (
    average_reports,
    compare_with_peer,
    report_classification,
)
from .tasks import Split, train

#: for images: the last layer has thousands of parameters, whose dense matrix takes minutes
OURS_ON_IMAGES: dict[str, tuple[str, str | None]] = {
    "pullback EK-FAC": ("ekfac", None),
    "pullback last layer": ("ekfac", "last layer"),
}


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
                checks.append(
                    compare_with_peer(label, method, ours, theirs[angle], recorded=recorded)
                )
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
