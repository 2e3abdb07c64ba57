"""Means of losses and accuracies over a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .data import DataSet

#: (outputs, targets) ↦ a mean over the samples
Measure = Callable[[Tensor, Tensor], Tensor]


def accuracy(z: Tensor, y: Tensor) -> Tensor:
    """The share of samples, or of their places, whose largest output is the right one."""
    return (z.argmax(-1) == y).double().mean()


@dataclass(frozen=True)
class Seen:
    """Means over both sets in evaluation mode; not on the clock."""

    model: nn.Module
    data: DataSet
    measures: Mapping[str, Measure]
    most: int
    half: torch.dtype | None = None

    @torch.no_grad()
    def now(self) -> dict[str, float]:
        """Every measure on the training and the test set."""
        training = self.model.training
        self.model.eval()
        d, most = self.data, self.most
        sets = {"train": (d.x[:most], d.y[:most]), "test": (d.test_x, d.test_y)}
        found = {}
        for side, (x, y) in sets.items():
            if len(x):
                found |= {f"{side} {k}": v for k, v in self._means(x, y).items()}
        self.model.train(training)
        return found

    def _means(self, x: Tensor, y: Tensor) -> dict[str, float]:
        sums = dict.fromkeys(self.measures, 0.0)
        for part, truth in zip(x.split(self.most), y.split(self.most), strict=True):
            with autocast(part, self.half):
                z = self.model(part)
            for name, measure in self.measures.items():
                sums[name] += float(measure(z.float() if self.half else z, truth)) * len(part)
        return {name: total / len(x) for name, total in sums.items()}


def autocast(x: Tensor, half: torch.dtype | None) -> Any:
    """Lower precision where a dtype is given."""
    return torch.autocast(x.device.type, half) if half else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that times mean something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
