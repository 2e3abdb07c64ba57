"""What is compared: an optimizer, and the settings to choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pullback import KFAC
from pullback.likelihoods import Likelihood

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


def sgd(model: nn.Module, likelihood: Likelihood, seed: int, some: Settings) -> Optimizer:
    """With Nesterov's momentum."""
    return torch.optim.SGD(model.parameters(), nesterov=True, **some)


def adam(model: nn.Module, likelihood: Likelihood, seed: int, some: Settings) -> Optimizer:
    """Adam."""
    return torch.optim.Adam(model.parameters(), **some)


def adamw(model: nn.Module, likelihood: Likelihood, seed: int, some: Settings) -> Optimizer:
    """Adam with decoupled weight decay."""
    return torch.optim.AdamW(model.parameters(), **some)


def kfac(model: nn.Module, likelihood: Likelihood, seed: int, some: Settings) -> KFAC:
    """K-FAC in the Fisher metric of the likelihood."""
    return KFAC(model, likelihood=likelihood, seed=seed, **some)


SGD, ADAM, ADAMW, KRONECKER = "SGD", "Adam", "AdamW", "K-FAC"
