"""L-BFGS for small losses, and Adam before another optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class AdamFirst(torch.optim.Optimizer):
    """Adam (3e-3) until `is_over()` says so, then another optimizer of the same parameters."""

    def __init__(self, following: torch.optim.Optimizer, is_over: Callable[[], bool]) -> None:
        params = following.param_groups[0]["params"]
        super().__init__(params, {})
        self.is_over = is_over
        self.adam = torch.optim.Adam(params, lr=3e-3)
        self.following = following

    def step(self, closure: Any = None) -> Any:
        if self.is_over():
            return self.following.step(closure)
        return self.adam.step(closure)


class ScaledLBFGS(torch.optim.LBFGS):
    """L-BFGS of 1000 times the loss: torch's drops curvature pairs below 1e-10."""

    scale = 1e3

    def step(self, closure: Callable[[], Any]) -> Any:
        def evaluate_scaled() -> Any:
            value = closure()
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.scale)
            return self.scale * value

        return super().step(evaluate_scaled) / self.scale


def make_lbfgs(params: Iterable[nn.Parameter], iterations: int = 1) -> ScaledLBFGS:
    """Return L-BFGS with strong Wolfe conditions that never stops early.

    Args:
        iterations: of a step. Every step begins with an evaluation at a known point.
    """
    return ScaledLBFGS(
        params, max_iter=iterations, max_eval=25 * iterations, history_size=100, tolerance_grad=0.0,
        tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip
