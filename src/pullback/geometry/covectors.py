"""Covectors of Z: the differential of a loss there, and the vector that a metric makes of one."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from .._core.errors import PullbackError
from ..grams import Part

Loss = Callable[[Tensor], Tensor]


def differential(loss: Loss, value: Tensor) -> Tensor:
    """∂L/∂z at z, in its shape."""
    if not callable(loss):
        raise PullbackError(
            "The loss is not usable",
            f"got {type(loss).__name__}",
            "Pass a function of φ(ξ) that gives a scalar tensor",
        )
    with torch.enable_grad():
        z = value.detach().clone().requires_grad_()
        total = loss(z)
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise PullbackError(
                "The loss is not one number",
                f"got {tuple(getattr(total, 'shape', ()))}",
                "Reduce it to a scalar tensor",
            )
        if not bool(torch.isfinite(total)):
            raise PullbackError("L is not finite at φ(ξ)", f"got {float(total.detach())}", "Move ξ")
        slope = None
        if total.requires_grad:
            (slope,) = torch.autograd.grad(total.reshape(()), z, allow_unused=True)
    slope = torch.zeros_like(z) if slope is None else slope
    if not bool(torch.isfinite(slope).all()):
        raise PullbackError("dL is not finite at φ(ξ)", "the loss is undefined there", "Move ξ")
    return slope.detach()


def raised(part: Part, covector: Tensor) -> Tensor:
    """The v with g v = dL, of least norm: v = S⁺ᵀr, sample by sample unless g couples them."""
    factor, value = part.factor, part.linear.value
    r = factor.whiten(covector).value
    if r is None:
        raise PullbackError(
            "dL is not in the range of the metric",
            "g is singular or overflows, and no vector v has g v = dL",
            "Use a nonsingular metric, or a loss that does not see its null directions",
        )
    if factor.couples_samples:
        eye = torch.eye(value.numel(), dtype=value.dtype, device=value.device)
        transposed = part.transpose(eye).T  # Sᵀ, (k, n)
        return (torch.linalg.pinv(transposed) @ r.flatten()).reshape(value.shape)
    columns = factor.covectors(value).flatten(2).permute(1, 2, 0)  # (N, |event|, R)
    flat = r.reshape(len(value), prod(factor.white))
    return (torch.linalg.pinv(columns.mT) @ flat[..., None]).reshape(value.shape)
