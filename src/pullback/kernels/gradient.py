r"""Functional gradients in kernel form: ∇ℓ = Σ_i K(·, x_i) ∇L(f(x_i), y_i).

The one formula is the gradient in every function space of finite kind:

    K = K_H   the gradient in an RKHS H of functions of x       (`metrics.rkhs`, or any function)
    K = K_f   its projection onto the tangent space T_fΦ        (`Projected`)
    K = Θ     the standard gradient, seen among functions       (`NTK`)
    K = K_GTK the natural gradient of any basis                 (`GTK`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .change import Expansion, FunctionChange
from .checks import refuse_no_tensor
from .kernel import TangentKernel
from .tangent import arguments

InputKernel = Callable[[Any, Any], Tensor]


def functional_gradient(
    kernel: TangentKernel | InputKernel, x: Any, cotangents: Tensor
) -> FunctionChange | Expansion:
    """The function Σ_i K(·, x_i) c_i, to be called at any points.

    Args:
        kernel: a tangent kernel, which gives a `FunctionChange` with its parameter direction; or a
            function of two batches of inputs, which gives an `Expansion`.
        x: the points of the empirical loss.
        cotangents: c = ∂ℓ/∂f(x_i), (N, *event), as autograd gives it for ℓ(f(x)).

    >>> from pullback.metrics.rkhs import sobolev_kernel
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> gradient = functional_gradient(lambda a, b: sobolev_kernel(a, b, 1.0), x, torch.ones(2, 1))
    >>> gradient(torch.tensor([[0.0]]))
    tensor([[1.7358]])
    """
    if isinstance(kernel, TangentKernel):
        return kernel.expand(x, cotangents)
    if not callable(kernel):
        raise PullbackError(
            "The kernel is not usable",
            f"got {type(kernel).__name__}",
            "Pass NTK, GTK or Projected of a Tangent, or a function of two batches of inputs",
        )
    points = arguments(x)
    refuse_no_tensor("The cotangents", cotangents)
    if len(cotangents) != len(points[0]) or not bool(torch.isfinite(cotangents).all()):
        raise PullbackError(
            "The cotangents do not fit the points",
            f"{tuple(cotangents.shape)} for {len(points[0])} points, or not finite",
            "Pass one finite cotangent per point",
        )
    c = cotangents.detach()
    return Expansion(kernel, x, c[:, None] if c.ndim == 1 else c)
