r"""What is there to gain? Approach I against SGD from the same point of the slice, in float64.

Without biases ⟨w_k, ∂L/∂w_k⟩ is the same number for all layers, which have the same norm on the
slice: the gradient is tangent, and approach I is SGD and a move along the orbit. So one step
changes the function exactly alike and leaves the parameters O(lr²) apart; after a second step the
functions are O(lr³) apart, O(lr²) of how far they moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, linear_regression

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback.symmetry import SliceSGD

from ..framework.experiment import Context
from ..framework.records import Record
from .networks import digits, mlp

WIDTHS = (64, 32, 24, 16, 10)
RATES = (0.01, 0.005, 0.0025, 0.00125)


def law(
    context: Context, widths: Sequence[int] = WIDTHS, samples: int = 64, networks: int = 3
) -> Record:
    """Differences of the two functions, over how far they moved, on one batch.

    Returns:
        the largest after one step, and geometric means over some networks after two, by rate; the
        slope of their logarithms against that of the rate.
    """
    images = digits(torch.float64)
    x = images.x[:samples].to(context.device)
    y = images.y[:samples].to(context.device)
    seeds = range(context.seed, context.seed + networks)

    def apart(lr: float, steps: int) -> list[float]:
        return [_difference(x, y, widths, seed, lr, steps) for seed in seeds]

    ends = [fmean(map(math.log, apart(lr, 2))) for lr in RATES]
    slope, _ = linear_regression([math.log(lr) for lr in RATES], ends)
    return {
        "one step": max(apart(RATES[0], 1)),
        "lr": list(RATES),
        "two steps": [math.exp(e) for e in ends],
        "slope": slope,
    }


def _difference(
    x: Tensor, y: Tensor, widths: Sequence[int], seed: int, lr: float, steps: int
) -> float:
    ends = []
    before = x.new_zeros(())
    for sliced in (False, True):
        torch.manual_seed(seed)
        model = _larger(mlp(*widths)).to(x)
        optimizer: Optimizer = SliceSGD(model, lr, group="layer")  # both start on the slice
        before = model(x).detach()
        if not sliced:
            optimizer = torch.optim.SGD(model.parameters(), lr)
        ends.append(_train_and_evaluate(model, optimizer, x, y, steps))
    return float((ends[0] - ends[1]).norm() / (ends[0] - before).norm())


def _larger(model: nn.Sequential) -> nn.Sequential:
    """Weights of variance 2/n, with which something happens from the first step on."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    return model


def _train_and_evaluate(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, steps: int
) -> Tensor:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model(x).detach()
