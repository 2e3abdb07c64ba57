"""Rules for operations that rearrange entries, pick or choose them, or pool neighbors.

A rule returns the labelled result of the node's operation. Its docstring says what the operation
does, and what the rule requires of the scales. Where entries may be scaled
and not mixed, as before a comparison, their activations are marked as nonlinear.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..scales import FIXED, ZERO
from ..values import Activation, ParameterCoordinates, Value
from ..walk import (
    Walk,
    add_constants,
    get_operation,
    label_results,
    list_shapes,
    operation_name,
    rule,
)

# --- entries that are moved about -----------------------------------------------------------


@rule(
    *("t", "transpose", "permute", "expand", "squeeze", "unsqueeze", "slice", "select", "flip"),
    *("roll", "repeat", "unfold", "diagonal", "channel_shuffle", "pixel_shuffle"),
    "pixel_unshuffle",
)
def follow_rearrangement(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The same operation on the labels."""
    options = args[1:]
    operation = get_operation(node)
    if any(isinstance(option, Value) for option in options):
        return NotImplemented
    return args[0].rearrange(lambda t: operation(t, *options, **kwargs))


@rule("view", "_unsafe_view", "view_copy", "_reshape_alias")
def follow_reshape(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The same entries in another shape."""
    shape = list_shapes(node)[0]
    if not isinstance(args[1], (list, tuple, torch.Size)):
        return args[0]  # the same shape in another dtype
    return args[0].rearrange(lambda t: t.reshape(shape))


@rule("split", "split_with_sizes", "unbind", "unsafe_split")
def follow_split(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Several pieces of a tensor."""
    operation = get_operation(node)

    def select_piece(t: Tensor, index: int) -> Tensor:
        return operation(t, *args[1:], **kwargs)[index]

    count = len(list_shapes(node))
    return [args[0].rearrange(partial(select_piece, index=i)) for i in range(count)]


@rule("clone", "alias", "detach", "_to_copy", "lift_fresh_copy", "lift_fresh", "lift", "_conj")
def follow_identity(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The tensor itself."""
    return args[0]


@rule("cat", "stack")
def follow_concatenation(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The same operation on lists of labels."""
    activations = [walk.as_activation(value) for value in args[0]]
    concatenate = get_operation(node)
    options = args[1:]
    scale = concatenate([activation.scale for activation in activations], *options)
    return Activation(scale, concatenate([a.unit for a in activations], *options))


@rule("copy")
def follow_copy(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The second tensor in the shape of the first."""
    shape = list_shapes(node)[0]
    return args[1].rearrange(lambda t: t.expand(shape))


@rule("slice_scatter", "select_scatter")
def follow_scatter(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A part of a tensor overwritten by another."""
    target = walk.as_activation(args[0])
    source = walk.as_activation(args[1])
    scatter = partial(get_operation(node), **kwargs)
    options = args[2:]
    scale = scatter(target.scale.contiguous(), source.scale.contiguous(), *options)
    unit = scatter(target.unit.contiguous(), source.unit.contiguous(), *options)
    return Activation(scale, unit)


# --- zeros ----------------------------------------------------------------------------------


@rule("constant_pad_nd")
def follow_padding(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Zeros around a tensor, which any scale leaves alone, or another number."""
    x = walk.as_activation(args[0])
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    label = ZERO if value == 0 else FIXED
    walk.mark_nonlinear(x)
    padded = torch.nn.functional.pad(x.scale, args[1], value=label)
    return Activation.expand(padded, list_shapes(node)[0])


@rule("tril", "triu")
def follow_triangle(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Zeros in place of some entries."""
    x = walk.as_activation(args[0])
    walk.mark_nonlinear(x)
    is_kept = get_operation(node)(torch.ones(x.shape), *args[1:]).bool()
    return Activation.expand(torch.where(is_kept, x.scale, ZERO), x.shape)


@rule(
    *("zeros", "new_zeros", "zeros_like", "ones_like", "empty", "empty_like", "new_empty"),
    *("bernoulli", "rand", "randn", "rand_like", "randn_like"),
)
def follow_constant(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Structural zeros, and numbers that no parameter enters."""
    label = ZERO if "zeros" in operation_name(node) else FIXED
    return label_results(node, torch.tensor(label))


@rule("scalar_tensor", "full")
def follow_fill(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One number everywhere."""
    number = args[-1]
    if not isinstance(number, (int, float)):
        return label_results(node, torch.tensor(FIXED))
    return label_results(node, _label_number(number).scale)


def _label_number(value: float) -> Activation:
    """Return a number as an activation.

    No positive scale moves an infinity (minus infinity is a mask), so it counts as a zero.
    """
    return Activation.constant((), is_zero=value in (0, float("inf"), float("-inf")))


# --- neighbors and choices ------------------------------------------------------------------


@rule(
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact2d", "_upsample_bilinear2d_aa"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
)
def follow_pooling(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Neighbors within a channel are compared, averaged or repeated."""
    x = walk.as_activation(args[0])
    walk.mark_nonlinear(x)
    position_axes = next(d for d in (1, 2, 3) if f"{d}d" in operation_name(node))
    scale = walk.scales.merge(x.scale, range(-position_axes, 0))
    return add_constants(node, Activation.expand(scale, list_shapes(node)[0]))


@rule("index_select", "gather", "index")
def follow_index(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Entries picked by an index whose values are not read: one scale along the indexed axes."""
    x = walk.as_activation(args[0])
    shape = list_shapes(node)[0]
    walk.mark_nonlinear(x)
    if isinstance(args[0], ParameterCoordinates) and len(args[0].sizes) > 2:
        name = args[0].name
        walk.add_note(f"which matrix of {name} is used depends on values: all are scaled alike")
    if operation_name(node).startswith(("index_select", "gather")):
        dim = args[1] % len(x.shape)
        return Activation.expand(walk.scales.merge(x.scale, [dim]), shape)
    indices = args[1]
    dims = [d for d, index in enumerate(indices) if index is not None]
    if len(dims) != 1 or isinstance(indices[dims[0]], ParameterCoordinates):
        return NotImplemented
    dim = dims[0]
    scale = walk.scales.merge(x.scale, dims)
    index_axes = [1] * len(indices[dim].shape)
    scale = scale.reshape(*scale.shape[:dim], *index_axes, *scale.shape[dim + 1 :])
    return Activation.expand(scale, shape)


@rule("gt", "ge", "lt", "le", "eq", "ne", "sign", "sgn", "isnan", "isinf")
def follow_comparison(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Comparisons with 0, or of values with one scale, do not change under positive scales."""
    x = walk.as_activation(args[0])
    other = args[1] if len(args) == 2 else 0
    walk.mark_nonlinear(x)
    if isinstance(other, Value):
        other = walk.as_activation(other)
        walk.mark_nonlinear(other)
        walk.scales.unify(x.scale, other.scale)
    elif other != 0:
        walk.scales.fix(x.scale)
    return label_results(node, torch.tensor(FIXED))


@rule("where")
def follow_where(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Both choices have one scale."""
    if len(args) < 3:
        return NotImplemented
    mask, chosen, other = (_label_value(walk, value) for value in args)
    walk.mark_nonlinear(mask, chosen, other)
    shape = torch.broadcast_shapes(mask.shape, chosen.shape, other.shape)
    return Activation.expand(walk.scales.unify(chosen.scale, other.scale), shape)


@rule("masked_fill")
def follow_masked_fill(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`where` with another order of arguments."""
    x, mask, value = args
    return follow_where(walk, node, [mask, value, x], {})


def _label_value(walk: Walk, value: Value | float) -> Activation:
    """Return an activation, a parameter or a number as an activation."""
    if isinstance(value, Value):
        return walk.as_activation(value)
    return _label_number(value)
