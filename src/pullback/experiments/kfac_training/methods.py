"""The optimizers with their grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ... import KFAC
from ...likelihoods import Likelihood

Settings = Mapping[str, Any]
OF_THE_RUN = ("batch", "epochs")
#: (model, likelihood, seed, settings) ↦ optimizer
Build = Callable[[nn.Module, Likelihood, int, Settings], Optimizer]


@dataclass(frozen=True)
class Method:
    """Something to compare.

    Attributes:
        name: in tables and figures.
        build: the optimizer.
        grid: settings to choose from; `batch` and `epochs` among them are of the run.
        common: settings that stay.
        rivals: if there are any, the settings with the fewest steps that end as low as the best of
            these do in their searches; the lowest end otherwise.
    """

    name: str
    build: Build
    grid: Sequence[Settings]
    common: Mapping[str, Any]
    rivals: Sequence[str] = ()

    def described(self) -> dict[str, Any]:
        """Everything a run depends on."""
        rivals = {"rivals": list(self.rivals)} if self.rivals else {}
        return {"grid": [dict(s) for s in self.grid], **self.common, **rivals}

    def best(self, scores: Sequence[float], mark: float) -> Settings:
        """Of the grid, by the losses at the ends and the least one of the rivals."""
        order = range(len(self.grid))
        enough = [i for i in order if self.rivals and scores[i] <= mark]
        if not enough:
            return self.grid[min(order, key=scores.__getitem__)]
        steps = {i: self.grid[i]["epochs"] / self.grid[i]["batch"] for i in enough}
        return self.grid[min(enough, key=lambda i: (steps[i], scores[i]))]

    def on(self, model: nn.Module, likelihood: Likelihood, seed: int, some: Settings) -> Optimizer:
        """The optimizer of a model."""
        own = {k: v for k, v in some.items() if k not in OF_THE_RUN}
        return self.build(model, likelihood, seed, {**own, **self.common})


def _sgd(model: nn.Module, likelihood: Likelihood, seed: int, some: Settings) -> Optimizer:
    return torch.optim.SGD(model.parameters(), nesterov=True, **some)


def _adam(model: nn.Module, likelihood: Likelihood, seed: int, some: Settings) -> Optimizer:
    return torch.optim.Adam(model.parameters(), **some)


def _kfac(model: nn.Module, likelihood: Likelihood, seed: int, some: Settings) -> KFAC:
    return KFAC(model, likelihood=likelihood, seed=seed, **some)


SGD, ADAM, KRONECKER = "SGD", "Adam", "K-FAC"
METHODS = (
    Method(SGD, _sgd, [{"lr": lr} for lr in (3e-3, 1e-2, 3e-2, 0.1, 0.3)], {"momentum": 0.9}),
    Method(ADAM, _adam, [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2, 3e-2, 0.1)], {}),
    Method(
        KRONECKER,
        _kfac,
        [{"damping": d} for d in (0.01, 0.03, 0.1, 0.3, 1.0)],
        {"lr": 0.2, "kl_clip": 0.1, "momentum": 0.8, "statistics_every": 2, "invert_every": 10},
    ),
)

#: the same for MNIST, where small batches serve the first-order methods best, and large ones K-FAC
LARGE = (
    Method(
        SGD,
        _sgd,
        [{"lr": lr, "batch": 250} for lr in (1e-4, 3e-4, 1e-3, 3e-3)]
        + [{"lr": lr, "batch": 1000} for lr in (1e-3, 3e-3)],
        {"momentum": 0.9},
    ),
    Method(
        ADAM,
        _adam,
        [{"lr": lr, "batch": 250} for lr in (1e-3, 2e-3, 4e-3)]
        + [{"lr": lr, "batch": 100} for lr in (5e-4, 1e-3, 2e-3)],
        {},
    ),
    Method(
        KRONECKER,
        _kfac,
        [
            {"damping": damping, "batch": batch, "epochs": epochs}
            for batch, epochs in ((4000, 100), (2000, 80), (1000, 100))  # 1500, 2400, 6000 steps
            for damping in (0.05, 0.1)
        ],
        {"lr": 0.2, "kl_clip": 0.03, "momentum": 0.8, "statistics_every": 5, "invert_every": 20},
        (SGD, ADAM),
    ),
)
