"""What is compared: an optimizer, and the settings to choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pullback import KFAC
from pullback.likelihoods import Likelihood

from ..learning.natural import natural_kfac

Settings = Mapping[str, Any]
OF_THE_RUN = ("batch", "epochs")
#: (model, likelihood, seed, settings) ↦ optimizer
Build = Callable[[nn.Module, Likelihood, int, Settings], Optimizer]


@dataclass(frozen=True)
class TunedMethod:
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

    def describe(self) -> dict[str, Any]:
        """Return everything a run depends on."""
        if self.rivals:
            rivals = {"rivals": list(self.rivals)}
        else:
            rivals = {}
        return {"grid": [dict(s) for s in self.grid], **self.common, **rivals}

    def best(self, scores: Sequence[float], mark: float) -> Settings:
        """Return the setting of the grid with the best end, given the least loss of the rivals."""
        order = range(len(self.grid))
        enough = [i for i in order if self.rivals and scores[i] <= mark]
        if not enough:
            return self.grid[min(order, key=scores.__getitem__)]
        steps = {i: self.grid[i]["epochs"] / self.grid[i]["batch"] for i in enough}
        return self.grid[min(enough, key=lambda i: (steps[i], scores[i]))]

    def on(
        self, model: nn.Module, likelihood: Likelihood, seed: int, settings: Settings
    ) -> Optimizer:
        """Return the optimizer of a model."""
        options = {k: v for k, v in settings.items() if k not in OF_THE_RUN}
        return self.build(model, likelihood, seed, {**options, **self.common})


def sgd(model: nn.Module, likelihood: Likelihood, seed: int, settings: Settings) -> Optimizer:
    """Return SGD with Nesterov's momentum."""
    return torch.optim.SGD(model.parameters(), nesterov=True, **settings)


def adam(model: nn.Module, likelihood: Likelihood, seed: int, settings: Settings) -> Optimizer:
    """Return Adam."""
    return torch.optim.Adam(model.parameters(), **settings)


def adamw(model: nn.Module, likelihood: Likelihood, seed: int, settings: Settings) -> Optimizer:
    """Return Adam with decoupled weight decay."""
    return torch.optim.AdamW(model.parameters(), **settings)


def kfac(model: nn.Module, likelihood: Likelihood, seed: int, settings: Settings) -> KFAC:
    """Return K-FAC in the Fisher metric of the likelihood."""
    return natural_kfac(model, likelihood=likelihood, seed=seed, **settings)


SGD = "SGD"
ADAM = "Adam"
ADAMW = "AdamW"
KRONECKER = "K-FAC"


METHODS = (
    TunedMethod(SGD, sgd, [{"lr": lr} for lr in (3e-3, 1e-2, 3e-2, 0.1, 0.3)], {"momentum": 0.9}),
    TunedMethod(ADAM, adam, [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2, 3e-2, 0.1)], {}),
    TunedMethod(
        KRONECKER,
        kfac,
        [{"damping": d} for d in (0.01, 0.03, 0.1, 0.3, 1.0)],
        {"lr": 0.2, "kl_clip": 0.1, "momentum": 0.8, "statistics_every": 2, "invert_every": 10},
    ),
)


def _cross(
    first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]
) -> list[dict[str, float]]:
    """Return every pair of settings in one; the second ones vary fastest."""
    return [{**other, **one} for one, other in product(first, second)]


#: the same for MNIST, where small batches serve the first-order methods best, and large ones K-FAC
LARGE = (
    TunedMethod(
        SGD,
        sgd,
        [{"lr": lr, "batch": 250} for lr in (1e-4, 3e-4, 1e-3, 3e-3)]
        + [{"lr": lr, "batch": 1000} for lr in (1e-3, 3e-3)],
        {"momentum": 0.9},
    ),
    TunedMethod(
        ADAM,
        adam,
        [{"lr": lr, "batch": 250} for lr in (1e-3, 2e-3, 4e-3)]
        + [{"lr": lr, "batch": 100} for lr in (5e-4, 1e-3, 2e-3)],
        {},
    ),
    TunedMethod(
        KRONECKER,
        kfac,
        _cross(
            # 1500, 2400 and 6000 steps
            [
                {"batch": 4000, "epochs": 100},
                {"batch": 2000, "epochs": 80},
                {"batch": 1000, "epochs": 100},
            ],
            [{"damping": 0.05}, {"damping": 0.1}],
        ),
        {"lr": 0.2, "kl_clip": 0.03, "momentum": 0.8, "statistics_every": 5, "invert_every": 20},
        (SGD, ADAM),
    ),
)

# --- VGG-16 on CIFAR-10 ----------------------------------------------------------------------

_SGD = {"momentum": 0.9, "weight_decay": 5e-4, "fused": True}
_ADAMW = {"weight_decay": 0.05, "fused": True}
_KFAC = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.015}
VGG = (
    TunedMethod(
        SGD,
        sgd,
        [{"lr": lr, "batch": 128} for lr in (0.02, 0.05, 0.1)] + [{"lr": 0.1, "batch": 512}],
        _SGD,
    ),
    TunedMethod(
        ADAMW,
        adamw,
        [{"lr": lr, "batch": 128} for lr in (5e-4, 1e-3, 2e-3)] + [{"lr": 2e-3, "batch": 512}],
        _ADAMW,
    ),
    TunedMethod(
        KRONECKER,
        kfac,
        _cross(
            # 776 and 2340 steps
            [
                {"kl_clip": 0.01, "batch": 512, "epochs": 8},
                {"kl_clip": 0.003, "batch": 128, "epochs": 6},
            ],
            [{"damping": 0.03}, {"damping": 0.1}],
        ),
        {**_KFAC, "statistics_every": 10, "invert_every": 100},
        (SGD, ADAMW),
    ),
)
QUICK_VGG = (
    TunedMethod(SGD, sgd, [{"lr": lr} for lr in (0.03, 0.1)], _SGD),
    TunedMethod(ADAMW, adamw, [{"lr": lr} for lr in (3e-3, 1e-2)], _ADAMW),
    TunedMethod(
        KRONECKER,
        kfac,
        [{"damping": d} for d in (0.03, 0.1)],
        {**_KFAC, "kl_clip": 0.003, "statistics_every": 2, "invert_every": 10},
    ),
)

# --- the transformer on text -----------------------------------------------------------------

_SGD_TEXT = {"momentum": 0.9, "weight_decay": 1e-4, "fused": True}
_ADAMW_TEXT = {"betas": [0.9, 0.99], "weight_decay": 0.1, "fused": True}
_KFAC_TEXT = {"momentum": 0.9, "weight_decay": 1e-3}
TEXT = (
    TunedMethod(SGD, sgd, [{"lr": lr} for lr in (0.03, 0.1, 0.2, 0.4)], _SGD_TEXT),
    TunedMethod(ADAMW, adamw, [{"lr": lr} for lr in (5e-4, 1e-3, 2e-3, 4e-3)], _ADAMW_TEXT),
    TunedMethod(
        KRONECKER,
        kfac,
        _cross(
            [{"batch": 64, "epochs": 6}, {"batch": 64, "epochs": 12}],  # 732 and 1464 steps
            [{"kl_clip": 3e-4}, {"kl_clip": 1e-3}],
        ),
        {**_KFAC_TEXT, "lr": 0.1, "damping": 0.03, "statistics_every": 10, "invert_every": 100},
        (SGD, ADAMW),
    ),
)
QUICK_TEXT = (
    TunedMethod(SGD, sgd, [{"lr": lr} for lr in (0.1, 0.3)], _SGD_TEXT),
    TunedMethod(ADAMW, adamw, [{"lr": lr} for lr in (3e-3, 1e-2)], _ADAMW_TEXT),
    TunedMethod(
        KRONECKER,
        kfac,
        [{"damping": d} for d in (0.003, 0.01)],
        {**_KFAC_TEXT, "lr": 0.03, "kl_clip": 1e-3, "statistics_every": 2, "invert_every": 10},
    ),
)
