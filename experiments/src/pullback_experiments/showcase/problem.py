"""Something to train: a model, steps of an optimizer on it, and what is measured of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .contender import Contender

#: takes one step, and returns the loss before it
Stepper = Callable[[], float]


class Problem(ABC):
    """A training problem with fixed data and a fixed initial model.

    Attributes:
        title: its name in tables and figures.
        setting: model and data in a few words.
        seconds: the time that each contender gets.
        contenders: the optimizers that race on it.
    """

    title: str
    setting: str
    seconds: float
    contenders: tuple[Contender, ...]

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, the same for every contender."""

    @abstractmethod
    def stepper(self, contender: Contender, model: nn.Module, optimizer: Optimizer) -> Stepper:
        """What steps the contender's optimizer on this model."""

    @abstractmethod
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Numbers by name; the first is plotted and tuned for, and smaller is better."""

    def picture(self, models: Mapping[str, nn.Module], folder: Path) -> Path | None:
        """A figure of what the contenders' models became, where there is something to see."""
        return None


class Supervised(Problem):
    """A loss of outputs on data.

    Attributes:
        x, y: the training data, samples first.
    """

    x: Tensor
    y: Tensor

    @abstractmethod
    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss that is trained, of outputs z."""

    def stepper(self, contender: Contender, model: nn.Module, optimizer: Optimizer) -> Stepper:
        """Steps on batches: the same sequence for all contenders with the same batch size."""
        generator = torch.Generator().manual_seed(0)

        def step() -> float:
            x, y = self.x, self.y
            if contender.batch is not None:
                chosen = torch.randint(len(x), (contender.batch,), generator=generator)
                x, y = x[chosen], y[chosen]
            return descend(optimizer, lambda: self.loss(model(x), y), contender.scale)

        return step


def descend(optimizer: Optimizer, loss: Callable[[], Tensor], scale: float = 1.0) -> float:
    """One step by a closure on scale·loss; the loss before it."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = scale * loss()
        value.backward()
        return value.detach()

    step: Any = optimizer.step
    return float(step(closure)) / scale
