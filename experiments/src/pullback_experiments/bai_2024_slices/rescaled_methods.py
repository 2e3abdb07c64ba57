"""The optimizers that meet a badly scaled start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pullback import KFAC
from pullback.likelihoods import Categorical
from pullback.symmetry import Sliced, SliceSGD, Symmetry

#: (model, its symmetry, learning rate, seed) ↦ optimizer
Build = Callable[[nn.Module, Symmetry, float, int], Optimizer]


@dataclass(frozen=True)
class Method:
    """Something to compare.

    Attributes:
        name: in tables and figures.
        build: the optimizer.
        rates: learning rates, of which the best on the network as it was is used.
        sliced: whether it lives on a slice, so that the scale of the start is forgotten.
    """

    name: str
    build: Build
    rates: Sequence[float]
    sliced: bool = False

    def described(self) -> dict[str, Any]:
        """Everything a run depends on."""
        return {"rates": list(self.rates), "sliced": self.sliced}


def _sgd(model: nn.Module, symmetry: Symmetry, lr: float, seed: int, momentum: float) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=momentum)


def _slice(
    model: nn.Module, symmetry: Symmetry, lr: float, seed: int, momentum: float
) -> Optimizer:
    return SliceSGD(model, lr, momentum=momentum, symmetry=symmetry)


def _adam(model: nn.Module, symmetry: Symmetry, lr: float, seed: int) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


def _sliced_adam(model: nn.Module, symmetry: Symmetry, lr: float, seed: int) -> Optimizer:
    return Sliced(_adam(model, symmetry, lr, seed), symmetry)


def _kfac(model: nn.Module, symmetry: Symmetry, lr: float, seed: int) -> Optimizer:
    return KFAC(
        model, lr, likelihood=Categorical(), damping=0.1, seed=seed,
        kl_clip=None, statistics_every=2, invert_every=5,
    )  # fmt: skip


def _sliced_kfac(model: nn.Module, symmetry: Symmetry, lr: float, seed: int) -> Optimizer:
    return Sliced(_kfac(model, symmetry, lr, seed), symmetry)


SGD, MOMENTUM, ADAM, KRONECKER, SLICE, SLICE_MOMENTUM, SLICED_ADAM, SLICED_KRONECKER = (
    "SGD", "SGD, momentum", "Adam", "K-FAC",
    "SliceSGD", "SliceSGD, momentum", "Sliced Adam", "Sliced K-FAC",
)  # fmt: skip

_PLAIN, _HEAVY, _ADAM = (0.03, 0.1, 0.3), (0.01, 0.03, 0.1), (1e-3, 3e-3, 1e-2)
METHODS = (
    Method(SGD, partial(_sgd, momentum=0.0), _PLAIN),
    Method(MOMENTUM, partial(_sgd, momentum=0.9), _HEAVY),
    Method(ADAM, _adam, _ADAM),
    Method(KRONECKER, _kfac, _HEAVY),
    Method(SLICE, partial(_slice, momentum=0.0), _PLAIN, sliced=True),
    Method(SLICE_MOMENTUM, partial(_slice, momentum=0.9), _HEAVY, sliced=True),
    Method(SLICED_ADAM, _sliced_adam, _ADAM, sliced=True),
    Method(SLICED_KRONECKER, _sliced_kfac, _HEAVY, sliced=True),
)
