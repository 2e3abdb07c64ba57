"""What cannot be audited is refused at once, with the reason and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.capture import select
from ..._core.errors import PullbackError, reraise_fatal
from ..._core.space import tolerance
from ..charts.transformations import Twin
from .run import Setting, duplicate, refuse_loss, seeded


def check_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """(x, y), as two tensors with samples."""
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not pair or not all(isinstance(t, Tensor) for t in batch):
        raise PullbackError(
            "The batch is no pair of tensors",
            f"got {type(batch).__name__}",
            "Give (x, y), inputs and targets",
        )
    x, y = batch
    if not x.numel() or not len(x):
        raise PullbackError("The batch is empty", f"x has shape {tuple(x.shape)}", "Give samples")
    return x, y


def check_sizes(sizes: Sequence[float], steps: int) -> tuple[float, ...]:
    """Sizes from the largest to the smallest."""
    usable = [float(s) for s in sizes]
    if len(set(usable)) < 2 or not all(0 < s < math.inf for s in usable):
        raise PullbackError(
            "The step sizes are not usable",
            f"got {list(sizes)}; the order in the step size takes two different positive ones",
            "Use multiples of the lr such as (1, 0.1, 0.01)",
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise PullbackError("The number of steps is not usable", f"got {steps!r}", "Use 0 or more")
    return tuple(sorted(set(usable), reverse=True))


def check_model(model: nn.Module, setting: Setting) -> None:
    """Raise for models that are not deterministic, or whose loss is not finite."""
    if not isinstance(model, nn.Module):
        raise PullbackError(
            "An audit needs a module",
            f"got {type(model).__name__}",
            "Pass an nn.Module; it is copied for every run",
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise PullbackError(
            "There is nothing to optimize",
            "no parameter requires a gradient",
            "Unfreeze at least one parameter",
        )
    one, two = (_value(model, setting.at, seed) for seed in (setting.seed, setting.seed + 1))
    if not torch.equal(one, two) and bool(torch.isfinite(one).all()):
        raise PullbackError(
            "The model is not deterministic",
            "two calls on the same inputs differ, as with dropout in training mode",
            "Call model.eval(), or set the dropout to zero",
        )
    if setting.probes is not None:
        _refuse_probes(model, setting.probes, setting.seed)
    with torch.no_grad(), seeded(setting.seed, setting.x.device):
        refuse_loss(setting.loss(one, setting.y))


def check_twin(model: nn.Module, twin: Twin, setting: Setting, name: str) -> None:
    """Raise where the twin does not compute the model's function from the start."""
    one, two = (_value(m, setting.at, setting.seed) for m in (model, twin.model))
    limit = tolerance(one.dtype, 10) * float(one.norm())
    if one.shape != two.shape or not float((one - two).norm()) <= limit:
        raise PullbackError(
            f"The twin of {name!r} is another function",
            "its outputs on the batch are not the model's",
            "Use layers as modules, and what stands between them as the transformation needs it",
        )


def _refuse_probes(model: nn.Module, probes: Tensor, seed: int) -> None:
    try:
        _value(model, probes, seed)
    except RuntimeError as error:
        reraise_fatal(error)
        raise PullbackError(
            "The model cannot be evaluated at the probes",
            str(error).splitlines()[0],
            "Give inputs of the shape of the batch's",
        ) from error


def _value(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    with torch.no_grad(), seeded(seed, x.device):
        return select(duplicate(model)(x), None)
