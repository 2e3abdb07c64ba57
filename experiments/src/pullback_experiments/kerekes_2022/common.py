"""What the experiments of the paper share: its name, data, directions and accuracies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Random numbers that no device and no other item changes."""
    return torch.Generator().manual_seed(seed)


def normal(shape: Sequence[int], source: torch.Generator, device: torch.device) -> Tensor:
    """Standard normal numbers, drawn on the CPU so that every device sees the same."""
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
    a, b = one / one.norm(), two.to(one) / two.norm()
    return float(torch.rad2deg(2 * torch.atan2((a - b).norm(), (a + b).norm())))


def flat_start(dim: int, depth: int, scale: float, device: torch.device) -> DiagonalNetwork:
    """w₁ = … = w_{L−1} = scale and w_L = 0: β = 0, free to take either sign."""
    factors = torch.full((depth, dim), scale, dtype=DTYPE, device=device)
    factors[-1] = 0.0
    return DiagonalNetwork(dim, depth, factors)
