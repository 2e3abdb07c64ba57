"""Rules for comparisons, choices between tensors, and constants."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..graph.scales import FIXED, ZERO
from ..graph.values import Act, Ref
from ..graph.walk import Walk, result, rule


@rule("gt", "ge", "lt", "le", "eq", "ne")
def compared(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Signs do not change under positive scales; neither do comparisons of things scaled alike."""
    x, y = args[:2]
    act = walk.act(x)
    walk.touch(act)
    if isinstance(y, (Act, Ref)):
        other = walk.act(y)
        walk.touch(other)
        walk.scales.unify(act.scale, other.scale)
    elif y != 0:
        walk.scales.fix(act.scale)
    return result(node, torch.tensor(FIXED))


@rule("sign", "sgn", "zeros_like", "ones_like", "isnan", "isinf")
def signs(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """What depends on shapes and signs alone."""
    walk.touch(walk.act(args[0]))
    zero = "zeros" in str(node.target)
    return result(node, torch.tensor(ZERO if zero else FIXED))


@rule("where")
def where(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Both choices are scaled alike."""
    if len(args) < 3:
        return NotImplemented
    sides = [v if isinstance(v, (Act, Ref)) else _number(v) for v in args[1:3]]
    one, two = (walk.act(s) for s in sides)
    walk.touch(walk.act(args[0]), one, two)
    shape = torch.broadcast_shapes(walk.act(args[0]).shape, one.shape, two.shape)
    return Act.of(walk.scales.unify(one.scale, two.scale), shape)


@rule("masked_fill")
def masked_fill(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Like `where`."""
    return where(walk, node, [args[1], _filling(args[2]), args[0]], {})


def _filling(value: Any) -> Any:
    return value if isinstance(value, (Act, Ref)) else _number(value)


def _number(value: float) -> Act:
    # minus infinity is a mask: no finite scale moves it
    return Act.constant((), zero=value == 0 or value in (float("inf"), float("-inf")))


@rule("zeros", "new_zeros")
def zeros(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Structural zeros."""
    return result(node, torch.tensor(ZERO))


@rule("scalar_tensor", "full")
def filled(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A constant."""
    value = args[-1]
    return result(
        node, _number(value).scale if isinstance(value, (int, float)) else torch.tensor(FIXED)
    )
