"""Tasks of the Laplace experiments, and the training of their networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ...learning import data


@dataclass(frozen=True)
class Split:
    """Training and test samples of one task."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


GENERATED = "generated"


def generate_split() -> Split:
    """Return a noisy sine of two inputs."""
    x = torch.randn(80, 2, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(80, 1)
    return Split(x[:60], y[:60], x[60:], y[60:])


def load_split(name: str, number: int) -> Split:
    """Return a standard split of a UCI set, with inputs and targets of mean 0 and variance 1."""
    if name == GENERATED:
        return generate_split()
    with np.load(data.file("uci_bnn9.npz")) as arrays:
        x = torch.from_numpy(arrays[f"{name}__x"]).double()
        y = torch.from_numpy(arrays[f"{name}__y"]).double().reshape(len(x), 1)
        test = torch.from_numpy(np.asarray(arrays[f"{name}__test_idx"][number])).long()
    is_test = torch.zeros(len(x), dtype=torch.bool)
    is_test[test[test >= 0]] = True
    x = (x - x[~is_test].mean(0)) / x[~is_test].std(0).clamp(min=1e-8)
    y = (y - y[~is_test].mean(0)) / y[~is_test].std(0)
    return Split(x[~is_test], y[~is_test], x[is_test], y[is_test])


def train(
    model: nn.Module,
    split: Split,
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    decay: float,
    batch: int,
) -> None:
    """Train with Adam, whose rate falls along half a cosine; `decay` is that of the mean loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=decay)
    steps = epochs * math.ceil(len(split.x) / batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(split.x)).split(batch):
            optimizer.zero_grad()
            loss(model(split.x[chosen]), split.y[chosen]).backward()
            optimizer.step()
            scheduler.step()
    model.eval()
