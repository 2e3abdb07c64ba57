"""Networks whose kernels are checked, each with inputs; J row by row from autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pullback.testing import jacobian
from tests.laws.models import (
    Attention,
    Functional,
    Norms,
    SharedWeight,
    Squeezed,
    TiedLanguageModel,
    TorchAttention,
    Twice,
    Words,
    conv1d,
    conv2d,
    mlp,
)


class Grid(nn.Module):
    """Outputs of shape (2, 3): (N, 4) -> (N, 2, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(4, 5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).unflatten(1, (2, 3))


class Pair(nn.Module):
    """Two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(2, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(x) + self.right(y)))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(seed))


def transposed_convolution() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(2, 3, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(75, 2)
    )


Inputs = Callable[[int, int], Any]
NETS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "mlp": (lambda: mlp(3, 6, 5, 2), lambda n, s: draw(n, 3, seed=s)),
    "wide": (lambda: mlp(3, 40, 3), lambda n, s: draw(n, 3, seed=s)),
    "relu": (lambda: mlp(3, 6, 5, 2, activation=nn.ReLU()), lambda n, s: draw(n, 3, seed=s)),
    "grid": (Grid, lambda n, s: draw(n, 4, seed=s)),
    "scalars": (lambda: Squeezed(3), lambda n, s: draw(n, 3, seed=s)),
    "pair": (Pair, lambda n, s: (draw(n, 3, seed=s), draw(n, 2, seed=s + 9))),
    "conv2d": (conv2d, lambda n, s: draw(n, 2, 6, 6, seed=s)),
    "conv1d": (conv1d, lambda n, s: draw(n, 2, 8, seed=s)),
    "transposed": (transposed_convolution, lambda n, s: draw(n, 2, 2, 2, seed=s)),
    "attention": (lambda: Attention(4, 3), lambda n, s: draw(n, 3, 4, seed=s)),
    "torch attention": (lambda: TorchAttention(4, 2), lambda n, s: draw(n, 3, 4, seed=s)),
    "norms": (lambda: Norms(2), lambda n, s: draw(n, 4, 4, 4, seed=s)),
    "embedding": (lambda: Words(6, 3, 2), lambda n, s: tokens(n, 4, seed=s)),
    "tied": (lambda: TiedLanguageModel(6, 3, 4), lambda n, s: tokens(n, 4, seed=s)),
    "twice": (lambda: Twice(3, 2), lambda n, s: draw(n, 3, seed=s)),
    "shared": (lambda: SharedWeight(3, 2), lambda n, s: draw(n, 3, seed=s)),
    "bare": (lambda: Functional(3, 2), lambda n, s: draw(n, 3, seed=s)),
}


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return NETS[name][0]().double()


def inputs(name: str, n: int, seed: int = 0) -> Any:
    return NETS[name][1](n, seed)


def dense(model: nn.Module, x: Any) -> Tensor:
    """J, (N·m, p), by one reverse pass per entry of the output."""
    z = model(*(x if isinstance(x, tuple) else (x,)))
    return jacobian(z, [p for p in model.parameters() if p.requires_grad])


def blocks(matrix: Tensor, n: int, n2: int) -> Tensor:
    """(N·m, N2·m) as (N, N2, m, m)."""
    return matrix.reshape(n, -1, n2, matrix.shape[1] // n2).permute(0, 2, 1, 3)
