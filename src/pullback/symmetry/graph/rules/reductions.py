"""Rules for sums, extrema, norms and softmax along axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..ledger import SoftmaxReading
from ..scales import FIXED, collapse
from ..values import NO_UNIT, Activation
from ..walk import Walk, add_constants, label_results, list_shapes, operation_name, rule


@rule(
    *("sum", "mean", "amax", "amin", "max", "min", "cumsum", "std", "var"),
    *("linalg_vector_norm", "norm"),
)
def follow_reduction(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One scale along the axes that are reduced."""
    x = walk.as_activation(args[0])
    name = operation_name(node)
    shape = list_shapes(node)[0]
    dims = _find_dims(name, args, kwargs, len(x.shape))
    scale = x.scale
    if dims:
        scale = walk.scales.merge(scale, dims)
    if name == "var":
        scale = walk.scales.power(scale, 2)
    units = collapse(x.unit)
    # A mean over positions is an output of the layer like any other.
    is_followed = name == "mean" and x.shape.numel() and all(units.shape[d] == 1 for d in dims)
    if not is_followed:
        walk.mark_nonlinear(x)
        units = torch.tensor(NO_UNIT)
    if len(shape) != len(x.shape):
        scale = _drop_axes(scale, dims)
        units = _drop_axes(units, dims)
    return add_constants(node, Activation.expand(scale, shape, units))


def _find_dims(name: str, args: list[Any], kwargs: dict[str, Any], ndim: int) -> list[int]:
    """Return the axes that are reduced, counted from the front; by default all of them."""
    options = args[1:]
    if "norm" in name:  # the order of the norm comes first
        options = args[2:]
    default = options[0] if options else None
    dims = kwargs.get("dim", default)
    if isinstance(dims, int):
        dims = [dims]
    return [d % ndim for d in dims or range(ndim)]


def _drop_axes(t: Tensor, dims: list[int]) -> Tensor:
    """Return a tensor without these axes, which have size 1."""
    return t.reshape([size for d, size in enumerate(t.shape) if d not in dims])


@rule("_softmax", "_log_softmax", "_safe_softmax")
def follow_softmax(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Scales are fixed; a common shift is removed."""
    x = walk.as_activation(args[0])
    dim = args[1]
    count = x.shape[dim]
    units = collapse(x.unit)
    walk.scales.fix(x.scale)
    if units.numel() == units.shape[dim] and bool((units != NO_UNIT).all()):
        walk.ledger.add_readings(units.flatten().expand(count), range(count), SoftmaxReading)
    else:
        walk.mark_nonlinear(x)
    return label_results(node, torch.tensor(FIXED))
