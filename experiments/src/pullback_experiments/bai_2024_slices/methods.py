"""The optimizers that are compared on the seven-layer network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pullback.symmetry import Sliced, SliceSGD

#: (model on its device, learning rate) ↦ optimizer; may move the model's parameters
Build = Callable[[nn.Module, float], Optimizer]


@dataclass(frozen=True)
class SliceMethod:
    """Something to compare.

    Attributes:
        name, about: in tables and figures.
        build: the optimizer.
        rates: learning rates to choose from; none for the one that all others share.
        quick: its rate on the digits, where it has its own.
        seeds: of the full version, where it has its own.
    """

    name: str
    about: str
    build: Build
    rates: Sequence[float] = ()
    quick: float | None = None
    seeds: Sequence[int] | None = None

    def describe(self) -> dict[str, Any]:
        """Return everything a run depends on."""
        return {"about": self.about, "rates": list(self.rates), "digits": self.quick}


def _sgd(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def _from_slice(model: nn.Module, lr: float) -> Optimizer:
    SliceSGD(model, lr, group="layer")  # which moves the parameters there
    return _sgd(model, lr)


def _layers(gradient: str) -> Build:
    return lambda model, lr: SliceSGD(model, lr, group="layer", gradient=gradient)


def _units(model: nn.Module, lr: float) -> Optimizer:
    # all layers after every step: a captured step cannot take them in turn
    return SliceSGD(model, lr, sweeps=1)


def _adam(model: nn.Module, lr: float) -> Optimizer:
    captured = all(p.is_cuda for p in model.parameters())
    return torch.optim.Adam(model.parameters(), lr, capturable=captured)


def _sliced_adam(model: nn.Module, lr: float) -> Optimizer:
    return Sliced(_adam(model, lr), model, sweeps=1)


SGD = "SGD"
START = "SGD from the slice"
FIRST = "approach I"
SECOND = "approach II"
POLAR = "polar GTK"
UNITS = "units"
ADAM = "Adam"
SLICED = "Sliced Adam"

#: what the paper does not compare has two seeds on CIFAR-10
_TWO = (0, 1)
_ADAM_RATES = (1e-4, 3e-4, 1e-3, 3e-3)
METHODS = (
    SliceMethod(SGD, "torch's", _sgd),
    SliceMethod(START, "moved to equal norms once, then torch's", _from_slice),
    SliceMethod(FIRST, "equal norms of layers, Riemannian gradient", _layers("riemannian")),
    SliceMethod(
        SECOND, "equal norms of layers, as the paper computes it", _layers("gtk-orthonormal")
    ),
    SliceMethod(
        POLAR,
        "equal norms of layers, the stated polar basis",
        _layers("gtk-polar"),
        (1e-5, 1e-4, 1e-3, 1e-2),
        1e-2,
        _TWO,
    ),
    SliceMethod(UNITS, "a scale for every unit, balanced; equals Sliced(SGD)", _units, seeds=_TWO),
    SliceMethod(ADAM, "torch's", _adam, _ADAM_RATES, 3e-3, _TWO),
    SliceMethod(
        SLICED, "Adam, a scale for every unit, balanced", _sliced_adam, _ADAM_RATES, 3e-3, _TWO
    ),
)
