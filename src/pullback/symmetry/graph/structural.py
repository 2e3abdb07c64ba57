"""Rules for operations that move entries about, pick or choose them, or pool neighbors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .ledger import Act, Ref
from .scales import FIXED, ZERO
from .walk import Walk, result, rule, shapes, with_constants


@rule(
    *("t", "transpose", "permute", "expand", "squeeze", "unsqueeze", "slice", "select", "flip"),
    *("roll", "repeat", "unfold", "diagonal", "channel_shuffle", "pixel_shuffle"),
    "pixel_unshuffle",
)
def moved(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The same operation on the labels."""
    rest, target = args[1:], operation(node)
    if any(isinstance(r, (Act, Ref)) for r in rest):
        return NotImplemented
    return args[0].moved(lambda t: target(t, *rest, **kwargs))


def operation(node: Node) -> Callable[..., Any]:
    """What a node calls."""
    assert callable(node.target)
    return node.target


@rule("view", "_unsafe_view", "view_copy", "_reshape_alias")
def reshaped(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The same entries in another shape."""
    shape = shapes(node)[0]
    if not isinstance(args[1], (list, tuple, torch.Size)):
        return args[0]  # another dtype
    return args[0].moved(lambda t: t.reshape(shape))


@rule("split", "split_with_sizes", "unbind", "unsafe_split")
def parts(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Several pieces of a tensor."""
    count, target = len(shapes(node)), operation(node)
    return [args[0].moved(lambda t, i=i: target(t, *args[1:], **kwargs)[i]) for i in range(count)]


@rule("clone", "alias", "detach", "_to_copy", "lift_fresh_copy", "lift_fresh", "lift", "_conj")
def same(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The tensor itself."""
    return args[0]


@rule("cat", "stack")
def joined(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Concatenate or stack the labels."""
    acts = [walk.act(v) for v in args[0]]
    rest = args[1:]
    join = torch.cat if "cat" in str(node.target) else torch.stack
    return Act(join([a.scale for a in acts], *rest), join([a.unit for a in acts], *rest))


@rule("copy")
def copied(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The second tensor in the shape of the first."""
    shape = shapes(node)[0]
    return args[1].moved(lambda t: t.expand(shape))


@rule("slice_scatter", "select_scatter")
def written(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A part of a tensor overwritten by another."""
    whole, part = walk.act(args[0]), walk.act(args[1])
    write, rest = operation(node), args[2:]
    scale = write(whole.scale.contiguous(), part.scale.contiguous(), *rest, **kwargs)
    return Act(scale, write(whole.unit.contiguous(), part.unit.contiguous(), *rest, **kwargs))


@rule("constant_pad_nd")
def padded(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Zeros around, which any scale leaves alone."""
    act, pad = walk.act(args[0]), args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    label = ZERO if value == 0 else FIXED
    walk.touch(act)
    fill = torch.nn.functional.pad
    return Act.of(fill(act.scale, pad, value=label), shapes(node)[0])


@rule("tril", "triu")
def triangle(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Zeros in place of some entries."""
    act = walk.act(args[0])
    walk.touch(act)
    keep = operation(node)(torch.ones(act.shape), *args[1:]).bool()
    return Act.of(torch.where(keep, act.scale, ZERO), act.shape)


@rule(
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"),
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
    *("_upsample_nearest_exact2d", "_upsample_bilinear2d_aa"),
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
)
def pooled(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Neighbors within a channel are compared, averaged or repeated."""
    act = walk.act(args[0])
    walk.touch(act)
    count = next(d for d in (1, 2, 3) if f"{d}d" in str(node.target))
    merged = walk.scales.merge(act.scale, range(-count, 0))
    return with_constants(node, Act.of(merged, shapes(node)[0]))


@rule("index_select", "gather", "index")
def picked(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Entries picked by an index that is not looked at: one scale along the axes it runs over."""
    act, shape, name = walk.act(args[0]), shapes(node)[0], str(node.target)
    walk.touch(act)
    if isinstance(args[0], Ref) and len(args[0].sizes) > 2:
        note = f"which matrix of {args[0].name} is used depends on values: all are scaled alike"
        walk.notes += [note] if note not in walk.notes else []
    if "index_select" in name or "gather" in name:
        dim = args[1] % len(act.shape)
        return Act.of(walk.scales.merge(act.scale, [dim]), shape)
    indices = args[1]
    dims = [d for d, i in enumerate(indices) if i is not None]
    if len(dims) != 1 or isinstance(indices[dims[0]], Ref):
        return NotImplemented
    merged = walk.scales.merge(act.scale, dims)
    d, wide = dims[0], len(indices[dims[0]].shape)
    merged = merged.reshape(*merged.shape[:d], *[1] * wide, *merged.shape[d + 1 :])
    return Act.of(merged, shape)


@rule("gt", "ge", "lt", "le", "eq", "ne", "sign", "sgn", "isnan", "isinf")
def compared(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Comparisons with 0, or of values with one scale, do not change under positive scales."""
    x, y = args if len(args) == 2 else (args[0], 0)
    act = walk.act(x)
    walk.touch(act)
    if isinstance(y, (Act, Ref)):
        other = walk.act(y)
        walk.touch(other)
        walk.scales.unify(act.scale, other.scale)
    elif y != 0:
        walk.scales.fix(act.scale)
    return result(node, torch.tensor(FIXED))


@rule("where")
def where(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Both choices have one scale."""
    if len(args) < 3:
        return NotImplemented
    mask, one, two = (walk.act(v if isinstance(v, (Act, Ref)) else _number(v)) for v in args)
    walk.touch(mask, one, two)
    shape = torch.broadcast_shapes(mask.shape, one.shape, two.shape)
    return Act.of(walk.scales.unify(one.scale, two.scale), shape)


@rule("masked_fill")
def masked_fill(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Like `where`."""
    return where(walk, node, [args[1], args[2], args[0]], {})


def _number(value: float) -> Act:
    # minus infinity is a mask: no finite scale moves it
    return Act.constant((), zero=value == 0 or value in (float("inf"), float("-inf")))


@rule(
    *("zeros", "new_zeros", "zeros_like", "ones_like", "empty", "empty_like", "new_empty"),
    *("bernoulli", "rand", "randn", "rand_like", "randn_like"),
)
def constant(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Structural zeros, and numbers that no parameter enters."""
    return result(node, torch.tensor(ZERO if "zeros" in str(node.target) else FIXED))


@rule("scalar_tensor", "full")
def filled(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One number everywhere."""
    known = isinstance(args[-1], (int, float))
    return result(node, _number(args[-1]).scale if known else torch.tensor(FIXED))
