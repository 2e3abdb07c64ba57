"""torch's own optimizers, as builders for a race."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer


def sgd(model: nn.Module, lr: float) -> Optimizer:
    """Gradient descent with momentum 0.9."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adam(model: nn.Module, lr: float) -> Optimizer:
    """Adam with its usual moments."""
    return torch.optim.Adam(model.parameters(), lr=lr)


def lbfgs(model: nn.Module) -> Optimizer:
    """L-BFGS with a strong Wolfe line search, one iteration per step, no early stopping."""
    return torch.optim.LBFGS(
        model.parameters(),
        max_iter=1,
        max_eval=25,
        history_size=100,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
