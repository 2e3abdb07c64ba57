"""Something to train: a model, steps of an optimizer on it, and what is measured of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Competitor:
    """One optimizer.

    Attributes:
        name: what the tables and figures call it.
        build: (model, **settings) ↦ the optimizer.
        settings: the settings it races with: the best of `grid` at the full time budget, or a
            point nearby where the problem says why.
        grid: the settings that were tried; empty where nothing was tuned.
        batch: samples per step, drawn with replacement; None for all of them.
        scale: a factor on the loss that it sees.
    """

    name: str
    build: Callable[..., Optimizer]
    settings: Mapping[str, float] = field(default_factory=dict)
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    batch: int | None = None
    scale: float = 1.0

    def __call__(self, model: nn.Module, **settings: float) -> Optimizer:
        """Return the optimizer of this model, at the given settings or at its own."""
        return self.build(model, **(settings or self.settings))

    def candidates(self) -> Iterator[dict[str, float]]:
        """Every point of the grid.

        >>> list(Competitor("Adam", Optimizer, grid={"lr": (0.1, 0.2)}).candidates())
        [{'lr': 0.1}, {'lr': 0.2}]
        """
        for values in product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))


def sgd(model: nn.Module, lr: float) -> Optimizer:
    """Gradient descent with momentum 0.9."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(model: nn.Module, lr: float) -> Optimizer:
    """Adam with its usual moments."""
    return torch.optim.Adam(model.parameters(), lr=lr)


def lbfgs(model: nn.Module) -> Optimizer:
    """L-BFGS with a strong Wolfe line search, one iteration per step, no early stopping."""
    return torch.optim.LBFGS(
        model.parameters(),
        max_iter=1,
        max_eval=25,
        history_size=100,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )


#: takes one step, and returns the loss before it
Stepper = Callable[[], float]


class DemoProblem(ABC):
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
    contenders: tuple[Competitor, ...]

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, the same for every contender."""

    @abstractmethod
    def stepper(self, contender: Competitor, model: nn.Module, optimizer: Optimizer) -> Stepper:
        """Return a function that takes steps of the contender's optimizer on this model."""

    @abstractmethod
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Numbers by name; the first is plotted and tuned for, and smaller is better."""

    def picture(self, models: Mapping[str, nn.Module], folder: Path) -> Path | None:
        """Save a figure of the trained models and return its path, or None."""
        return None


class SupervisedTask(DemoProblem):
    """A loss of outputs on data.

    Attributes:
        x, y: the training data, samples first.
    """

    x: Tensor
    y: Tensor

    @abstractmethod
    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss that is trained, of outputs z."""

    def stepper(self, contender: Competitor, model: nn.Module, optimizer: Optimizer) -> Stepper:
        """Return a function that takes steps; equal batch sizes have equal batches."""
        generator = torch.Generator().manual_seed(0)

        def step() -> float:
            x = self.x
            y = self.y
            if contender.batch is not None:
                chosen = torch.randint(len(x), (contender.batch,), generator=generator)
                x = x[chosen]
                y = y[chosen]
            return descend(optimizer, lambda: self.loss(model(x), y), contender.scale)

        return step


def descend(optimizer: Optimizer, loss: Callable[[], Tensor], scale: float = 1.0) -> float:
    """Take one step by a closure on scale·loss; return the loss before it."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = scale * loss()
        value.backward()
        return value.detach()

    step: Any = optimizer.step
    return float(step(closure)) / scale
