"""Who trains the filters of the speed recipe, and with which settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pullback import KFAC
from pullback.optim.kfac import Spectral

from ..races.optimizers import Muon, polar
from .network import RecipeNetwork

#: a model ↦ the optimizers that step one after the other
Build = Callable[[RecipeNetwork], list[Optimizer]]


class Normalization(Enum):
    """To which length filters are brought before every step: it has no effect on the network."""

    NONE = "none"
    #: rows of root mean square length 1
    ROWS = "rows of length 1"
    #: entries of root mean square 0.02, so that steps by entries are in proportion to all filters
    ENTRIES = "entries of size 0.02"

    @torch.no_grad()
    def apply(self, filters: Sequence[Tensor]) -> None:
        """Rescale every tensor of filters as a whole."""
        if self is Normalization.NONE:
            return
        factors = []
        for p, norm in zip(filters, torch._foreach_norm(list(filters)), strict=True):
            if self is Normalization.ROWS:
                length = len(p) ** 0.5
            else:
                length = 0.02 * p.numel() ** 0.5
            factors.append(length / norm)
        torch._foreach_mul_(list(filters), factors)


@dataclass(frozen=True)
class SGDRates:
    """The published settings for biases and head, for a loss that is summed over the batch."""

    bias: float = 0.053
    head: float = 0.67
    momentum: float = 0.85
    #: learning rate times weight decay, for a batch of 2,000
    decay: float = 4e-3


PUBLISHED_RATES = SGDRates()


@dataclass(frozen=True)
class Entrant:
    """How the network is trained.

    Attributes:
        title: for readers.
        build: makes the optimizers.
        normalization: of filters before every step.
        freezes_patches: whether the bias of the first layer is trained in the first epochs alone,
            as in the recipe.
        epochs: of its training, where not those of the recipe.
        final_rate: what rates fall to, as a share of the first ones.
        averaged_steps: the last steps whose weights are averaged for the evaluation.
    """

    title: str
    build: Build
    normalization: Normalization = Normalization.ROWS
    freezes_patches: bool = True
    epochs: float | None = None
    final_rate: float = 0.0
    averaged_steps: int = 0


class RecipeMuon(Muon):
    """Muon as published with the recipe: steps of spectral norm about 1, and few iterations."""

    def __init__(
        self, params: Sequence[Tensor], lr: float, *, momentum: float, iterations: int
    ) -> None:
        super().__init__(params, lr, momentum=momentum, weight_decay=0.0)
        self.iterations = iterations

    def direction(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        if not state:
            state["m"] = torch.zeros_like(g)
        m = state["m"].lerp_(g, 1 - group["momentum"])
        return polar(g.lerp(m, group["momentum"]), self.iterations)


def make_sgd(model: RecipeNetwork, rates: SGDRates = PUBLISHED_RATES) -> Optimizer:
    """Return Nesterov's SGD for biases and head; the first group is the first layer's bias."""

    def make_group(params: Sequence[Tensor], lr: float) -> dict[str, Any]:
        return {"params": list(params), "lr": lr, "weight_decay": rates.decay / lr}

    assert model.patches.bias is not None
    groups = [
        make_group([model.patches.bias], rates.bias),
        make_group(model.norm_biases, rates.bias),
        make_group([model.head.weight], rates.head),
    ]
    fused = model.head.weight.is_cuda
    return torch.optim.SGD(groups, momentum=rates.momentum, nesterov=True, fused=fused)


def muon(lr: float = 0.24, momentum: float = 0.6, iterations: int = 3) -> Build:
    """Muon on filters, SGD on the rest."""
    return lambda model: [
        RecipeMuon(model.filters, lr, momentum=momentum, iterations=iterations),
        make_sgd(model),
    ]


def spectral(lr: float, make_rule: Callable[[], Spectral], **options: Any) -> Build:
    """K-FAC by a rule on filters, SGD on the rest."""
    return lambda model: [
        KFAC(model, lr, rule=make_rule(), params=model.filters, **options),
        make_sgd(model),
    ]


def kfac(lr: float | None = None, **options: Any) -> Build:
    """K-FAC for all parameters."""
    return lambda model: [KFAC(model, lr, **options)]
