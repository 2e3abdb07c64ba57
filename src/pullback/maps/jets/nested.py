"""The same derivatives by nested forward-mode differentiation, for any differentiable function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp

from .scheme import Index, Scheme

Function = Callable[[Tensor], Tensor]


def nested(function: Function, x: Tensor, scheme: Scheme) -> Tensor:
    """The channels (T, B, m) of function(x) for points x of shape (B, d)."""
    out = [_along(function, index)(x) for index in scheme.indices]
    if scheme.laplacian:
        out.append(torch.stack([_along(function, (i, i))(x) for i in scheme.laplacian]).sum(0))
    return torch.stack(out)


def _along(function: Function, index: Index) -> Function:
    for axis in index:
        function = _partial(function, axis)
    return function


def _partial(function: Function, axis: int) -> Function:
    def derivative(x: Tensor) -> Tensor:
        unit = torch.zeros_like(x)
        unit[..., axis] = 1
        return jvp(function, (x,), (unit,))[1]

    return derivative
