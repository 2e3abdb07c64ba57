"""What the experiments of the paper share: its name, data, directions and accuracies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.flow import Supervised, integrate
from pullback.likelihoods import Bernoulli
from pullback.linear import DiagonalNetwork

from ..framework.experiment import Experiment

PAPER = (
    "Kerekes, Mészáros and Huszár (2022), Depth Without the Magic: Inductive Bias of Natural "
    "Gradient Descent"
)
DTYPE = torch.float64


@dataclass(frozen=True, kw_only=True)
class Repeated(Experiment):
    """An experiment of this paper."""

    paper: str = PAPER


def generator(seed: int) -> torch.Generator:
    """Return a generator that no device and no other item changes."""
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], source: torch.Generator, device: torch.device) -> Tensor:
    """Return standard normal numbers, drawn on the CPU so that all devices have the same."""
    return torch.randn(*shape, generator=source, dtype=DTYPE).to(device)


def sparse(
    samples: int, dim: int, nonzero: int, source: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """x ~ N(0, 1), (N, D), and y = sign(x₁ + … + x_S): the paper's sparse ground truth."""
    x = normal((samples, dim), source, device)
    return x, x[:, :nonzero].sum(1).sign()


def expected_accuracy(beta: Tensor, nonzero: int) -> Tensor:
    """P(sign xᵀβ = sign xᵀβ*) = 1 − θ/π, θ the angle to β*, over x ~ N(0, 1); β (..., D)."""
    cosine = beta[..., :nonzero].sum(-1) / (nonzero**0.5 * beta.norm(dim=-1))
    return 1 - torch.arccos(cosine.clamp(-1, 1)) / torch.pi


def angle(one: Tensor, two: Tensor) -> float:
    """Degrees between two directions, exact for small ones too."""
    a = one / one.norm()
    b = two.to(one) / two.norm()
    return float(torch.rad2deg(2 * torch.atan2((a - b).norm(), (a + b).norm())))


def flat_start(dim: int, depth: int, scale: float, device: torch.device) -> DiagonalNetwork:
    """w₁ = … = w_{L−1} = scale and w_L = 0: β = 0, free to take either sign."""
    factors = torch.full((depth, dim), scale, dtype=DTYPE, device=device)
    factors[-1] = 0.0
    return DiagonalNetwork(dim, depth, factors)


def descend(
    model: DiagonalNetwork, direction: Callable[[], tuple[Tensor, ...]], lr: float, steps: int
) -> Iterator[Tensor]:
    """Yield β after every step w ← w − lr·direction, which changes the model."""
    for _ in range(steps):
        moves = direction()
        with torch.no_grad():
            for w, move in zip(model.factors, moves, strict=True):
                w -= lr * move
        yield model.beta.detach().clone()


def last(path: Iterator[Tensor]) -> Tensor:
    """Return β at the end of a descent."""
    *_, end = path
    return end


def sample_descent(
    model: DiagonalNetwork, x: Tensor, y: Tensor, lr: float, steps: int
) -> Iterator[Tensor]:
    """Descend with the Fisher matrix summed over the training samples; L is a sum too."""
    return descend(model, lambda: model.logistic_natural_gradient(x, y), lr, steps)


def population_descent(
    model: DiagonalNetwork, x: Tensor, y: Tensor, lr: float, steps: int
) -> Iterator[Tensor]:
    """Descend with the Fisher matrix averaged over N(0, 1); L is a mean."""

    def direction() -> tuple[Tensor, ...]:
        slopes = torch.sigmoid(-y * (x @ model.beta.detach()))
        return model.population_natural_gradient(-(y * slopes) @ x / len(x))

    return descend(model, direction, lr, steps)


def natural_flow(model: DiagonalNetwork, x: Tensor, y: Tensor, end: float) -> Tensor:
    """β of natural gradient flow at time `end`."""
    data = Supervised(x, (1 + y) / 2, Bernoulli(), "sum")
    trajectory = integrate(model, data, t=(0.0, end), rtol=1e-10, atol=1e-12, at=[end])
    factors = [w.to(DTYPE) for w in trajectory.parameters().values()]
    return torch.stack(factors).prod(0)
