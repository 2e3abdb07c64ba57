"""An optimizer that takes part in a race, with its settings and the grid they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Contender:
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
        """The optimizer of this model, at the given settings or at its own."""
        return self.build(model, **(settings or self.settings))

    def candidates(self) -> Iterator[dict[str, float]]:
        """Every point of the grid.

        >>> list(Contender("Adam", Optimizer, grid={"lr": (0.1, 0.2)}).candidates())
        [{'lr': 0.1}, {'lr': 0.2}]
        """
        for values in product(*self.grid.values()):
            yield dict(zip(self.grid, values, strict=True))
