r"""Gradient descent in an RKHS itself, without parameters.

    f ← f − η ∇ℓ = f − η Σ_i K(·, x_i) ∇L(f(x_i), y_i)

From f_0 = 0 the iterate is f_T = −Σ_t η_t K(·, x_t) ∇L(f_{t−1}(x_t), y_t): it stays in the span of
the kernel's sections at the data, and so is a vector of coefficients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .change import Expansion
from .layouts import as_matrix
from .tangent import arguments


@dataclass(frozen=True)
class Descent:
    """f_T with the losses on the way, ℓ(f_0) first; `function` is callable anywhere."""

    function: Expansion
    losses: Tensor

    def __call__(self, x: Any) -> Tensor:
        """f_T(x)."""
        return self.function(x)


def rkhs_descent(
    kernel: Callable[[Any, Any], Tensor],
    x: Any,
    loss: Callable[[Tensor], Tensor],
    event: tuple[int, ...] = (1,),
    *,
    lr: float,
    steps: int,
    order: str = "batch",
) -> Descent:
    """Descend ℓ(f(x)) from f = 0.

    Args:
        kernel: a function of two batches, giving (N, N') or (N, N', m, m).
        x: the data's inputs.
        loss: ℓ as a function of the values f(x), (N, *event), a sum over samples.
        event: the shape of one value.
        lr: η.
        steps: how many steps; in order "sequential" passes over the data.
        order: "batch" moves by all points at once, "sequential" by one at a time, in order.

    >>> x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [-1.0]])
    >>> found = rkhs_descent(
    ...     lambda a, b: torch.exp(-torch.cdist(a, b)),
    ...     x,
    ...     lambda f: 0.5 * (f - y).square().sum(),
    ...     lr=0.5,
    ...     steps=60,
    ... )
    >>> found(x)
    tensor([[ 1.0000],
            [-1.0000]])
    """
    counted = isinstance(steps, int) and steps >= 0
    if order not in ("batch", "sequential") or not lr > 0 or not counted:
        raise PullbackError(
            "The descent is not determined",
            f"order={order!r}, lr={lr}, steps={steps}",
            'Use order "batch" or "sequential", lr > 0 and a whole number of steps ≥ 0',
        )
    points = arguments(x)[0]
    size = torch.Size(event).numel()
    k = as_matrix(kernel(x, x), size).detach()
    c = torch.zeros(len(points), *event, dtype=k.dtype, device=k.device)
    losses = []
    for t in range(steps + 1):
        value, gradient = _gradient(loss, (k @ c.flatten()).view(c.shape))
        losses.append(value)
        if t == steps:
            break
        if order == "batch":
            c = c - lr * gradient
            continue
        for i in range(len(points)):
            _, gradient = _gradient(loss, (k @ c.flatten()).view(c.shape))
            c[i] -= lr * gradient[i]
    found = torch.stack(losses)
    if not bool(torch.isfinite(found).all()):
        raise PullbackError(
            "The descent diverged",
            f"the loss is not finite after {int(torch.isfinite(found).sum())} steps",
            "Lower lr: it must stay below 2 over the largest eigenvalue of K times L's curvature",
        )
    return Descent(Expansion(kernel, x, c), found)


def _gradient(loss: Callable[[Tensor], Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        values = values.detach().requires_grad_()
        out = loss(values)
        if not isinstance(out, Tensor) or out.numel() != 1 or not out.requires_grad:
            raise PullbackError(
                "The loss is not a number with a gradient",
                f"got {getattr(out, 'shape', type(out))}",
                "Return a sum over samples that depends on the values",
            )
        (gradient,) = torch.autograd.grad(out, values)
    return out.detach(), gradient
