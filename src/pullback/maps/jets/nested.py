"""The same derivatives by nested reverse-mode differentiation, for any differentiable function.

Not forward over forward: torch gets the second derivatives of layer norms and cumulative products
wrong that way, without saying so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad

from .scheme import Index, Scheme

Function = Callable[[Tensor], Tensor]


def nested(function: Function, x: Tensor, scheme: Scheme) -> Tensor:
    """The channels (T, B, m) of function(x) for points x (B, d) that do not see each other."""
    value = function(x)
    columns = []
    for j, column in enumerate(value.unbind(-1)):
        found = _derivatives(lambda y, j=j: function(y)[..., j], x, scheme)
        found[()] = column
        channels = [found[index] for index in scheme.indices]
        if scheme.laplacian:
            channels.append(torch.stack([found[i, i] for i in scheme.laplacian]).sum(0))
        columns.append(torch.stack(channels))
    return torch.stack(columns, -1)


def _derivatives(function: Function, x: Tensor, scheme: Scheme) -> dict[Index, Tensor]:
    """All derivatives of a scalar function's values (B,): one gradient gives those of all axes."""
    wanted = [*scheme.indices[1:], *((i, i) for i in scheme.laplacian)]
    found: dict[Index, Tensor] = {}
    for inner in {index[:-1] for index in wanted}:
        gradient = _gradient(_along(function, inner))(x)
        found.update({(*inner, i): gradient[:, i] for i in range(x.shape[-1])})
    return found


def _along(function: Function, index: Index) -> Function:
    for axis in index:
        function = _partial(function, axis)
    return function


def _partial(function: Function, axis: int) -> Function:
    return lambda x: _gradient(function)(x)[:, axis]


def _gradient(function: Function) -> Function:
    """x ↦ ∂f(x_b)/∂x_b for every point b, (B, d)."""
    return grad(lambda x: function(x).sum())
