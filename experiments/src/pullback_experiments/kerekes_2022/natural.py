r"""Natural gradient descent and flow of logistic regression in diagonal networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pullback.flow import Supervised, integrate
from pullback.likelihoods import Bernoulli
from pullback.linear import DiagonalNetwork

from .common import DTYPE


def descend(
    model: DiagonalNetwork, direction: Callable[[], tuple[Tensor, ...]], lr: float, steps: int
) -> Iterator[Tensor]:
    """w ← w − lr·direction, the model itself; gives β after every step."""
    for _ in range(steps):
        moves = direction()
        with torch.no_grad():
            for w, move in zip(model.factors, moves, strict=True):
                w -= lr * move
        yield model.beta.detach().clone()


def last(path: Iterator[Tensor]) -> Tensor:
    """The end of a descent."""
    *_, end = path
    return end


def sample_descent(
    model: DiagonalNetwork, x: Tensor, y: Tensor, lr: float, steps: int
) -> Iterator[Tensor]:
    """With the Fisher matrix averaged over the training samples; L and F both sums."""
    return descend(model, lambda: model.logistic_natural_gradient(x, y), lr, steps)


def population_descent(
    model: DiagonalNetwork, x: Tensor, y: Tensor, lr: float, steps: int
) -> Iterator[Tensor]:
    """With the Fisher matrix averaged over N(0, 1); L a mean."""

    def direction() -> tuple[Tensor, ...]:
        slopes = torch.sigmoid(-y * (x @ model.beta.detach()))
        return model.population_natural_gradient(-(y * slopes) @ x / len(x))

    return descend(model, direction, lr, steps)


def natural_flow(model: DiagonalNetwork, x: Tensor, y: Tensor, end: float) -> Tensor:
    """β of natural gradient flow at time `end`."""
    data = Supervised(x, (1 + y) / 2, Bernoulli(), "sum")
    found = integrate(model, data, t=(0.0, end), rtol=1e-10, atol=1e-12, at=[end])
    factors = [w.to(DTYPE) for w in found.parameters().values()]
    return torch.stack(factors).prod(0)
