"""Rules for sums, extrema and softmax along axes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.scales import FIXED, collapse
from ..graph.values import NONE, Act, Ref
from ..graph.walk import Walk, result, rule, shapes
from .pointwise import add


@rule("sum", "mean", "amax", "amin", "max", "min", "cumsum", "std", "linalg_vector_norm", "norm")
def reduced(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One scale along the axes that are summed over."""
    if len(args) > 1 and isinstance(args[1], (Act, Ref)):
        return add(walk, node, args, {})  # the larger of two tensors
    act = walk.act(args[0])
    name, ndim = str(node.target), len(act.shape)
    spec = kwargs.get(
        "dim",
        args[2 if "norm" in name else 1] if len(args) > (2 if "norm" in name else 1) else None,
    )
    dims = list(range(ndim)) if spec is None else [spec] if isinstance(spec, int) else list(spec)
    dims = [d % ndim for d in dims or range(ndim)] if ndim else []
    merged = walk.scales.merge(act.scale, dims) if dims else act.scale
    units = _averaged(act, dims) if getattr(node.target, "_opname", "") == "mean" else None
    if units is None:
        walk.touch(act)
    return _reduced_result(node, merged, units, dims)


def _averaged(act: Act, dims: list[int]) -> Tensor | None:
    """The units of a mean over places, which is an output of the layer like any; None else."""
    units = collapse(act.unit)
    wide = [d for d in dims if units.shape[d] > 1]
    return None if wide or not act.shape.numel() else units


def _reduced_result(node: Node, merged: Tensor, units: Tensor | None, dims: list[int]) -> Any:
    value = node.meta.get("val")
    shape = shapes(node)[0]
    if len(shape) != merged.ndim:
        merged = _without(merged, dims)
        units = None if units is None else _without(units, dims)
    out = Act.of(merged, shape, units)
    return [out, Act.constant(shape)] if isinstance(value, (list, tuple)) else out


def _without(t: Tensor, dims: list[int]) -> Tensor:
    """Axes of size 1 left out."""
    return t.reshape([n for d, n in enumerate(t.shape) if d not in dims])


@rule("var")
def variance(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Scales are squared."""
    out = reduced(walk, node, args, kwargs)
    return Act.of(walk.scales.power(out.scale, 2), out.shape)


@rule("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax")
def softmax(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Fixes scales; takes a common shift away."""
    act, dim = walk.act(args[0]), args[1]
    units = collapse(act.unit)
    walk.scales.fix(act.scale)
    if units.numel() == units.shape[dim] and bool((units != NONE).all()):
        walk.ledger.read("softmax", units.flatten().expand(act.shape[dim]), range(act.shape[dim]))
    else:
        walk.touch(act)
    return result(node, torch.tensor(FIXED))
