r"""Measures of a query: functions f(outputs, targets) with one number per sample.

The influence on a measure is ∇f(q)ᵀ (G + λ)⁻¹ ∇ℓ(z).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .checks import refuse_nonfinite

#: (outputs (N, *event), targets) ↦ (N,)
Measure = Callable[[Tensor, Any], Tensor]

_NO_CLASS = -100  # torch's ignore_index: a position without a target


def margin(outputs: Tensor, targets: Tensor) -> Tensor:
    r"""Return log p_y − log(1 − p_y) of the target's class, added up over positions: (N,).

    Logits z (N, ..., classes) and targets (N, ...); it is z_y − log Σ_{c≠y} exp z_c, which does not
    saturate as the loss does. Positions whose target is −100 count nothing, as in a loss.

    Raises:
        PullbackError: where targets are not classes of these logits.
    """
    is_counted = targets != _NO_CLASS
    _refuse_other_targets(outputs, targets, is_counted)
    classes = torch.where(is_counted, targets, 0).unsqueeze(-1)
    correct = outputs.gather(-1, classes)[..., 0]
    others = outputs.scatter(-1, classes, -torch.inf).logsumexp(-1)
    margins = torch.where(is_counted, correct - others, 0)
    return margins.reshape(len(margins), -1).sum(1)


def _refuse_other_targets(outputs: Tensor, targets: Tensor, is_counted: Tensor) -> None:
    remedy = "Give class numbers (N, ...) for logits (N, ..., classes); -100 leaves a position out"
    if targets.is_floating_point() or targets.shape != outputs.shape[:-1]:
        why = f"logits are {tuple(outputs.shape)}, targets {tuple(targets.shape)}, {targets.dtype}"
        raise PullbackError("The margin needs a class for every position", why, remedy)
    counted = targets[is_counted]
    classes = outputs.shape[-1]
    if bool(((counted < 0) | (counted >= classes)).any()):
        why = f"targets go from {int(counted.min())} to {int(counted.max())}, of {classes} classes"
        raise PullbackError("A target of the margin is no class", why, remedy)


def measure_gradient(measure: Measure, outputs: Tensor, targets: Any) -> Tensor:
    """Return ∂f/∂z of every sample as one covector, (1, N, *event)."""
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        values = measure(leaf, targets)
        if values.shape != outputs.shape[:1]:
            raise PullbackError(
                "The measure does not give one number per sample",
                f"outputs {tuple(outputs.shape)} gave shape {tuple(values.shape)}",
                "Return a tensor of shape (N,)",
            )
        if not values.requires_grad:
            raise PullbackError(
                "The measure does not depend on the outputs",
                "its values have no gradient",
                "Return a differentiable function of the outputs, without detach() or no_grad()",
            )
        refuse_nonfinite("The values of the measure", values.detach())
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return gradient[None]
