r"""The rule for weight normalization, W = g v/‖v‖ with norms over all axes but one.

(g, v) ↦ W is onto, so that whatever may be done to W can be done to g and v; W is a parameter of
its own for the walk. Beside that the length of v means nothing.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..actions.directed import Direction
from ..graph.values import Act, Ref
from ..graph.walk import Walk, rule, shapes


@rule("_weight_norm_interface", "_weight_norm")
def weight_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Of v and g; also the norms of v."""
    v, g = args[:2]
    dim = int(args[2] if len(args) > 2 else kwargs.get("dim", 0))
    shape, *others = shapes(node)
    whole = isinstance(v, Ref) and isinstance(g, Ref) and v.view == v.sizes and g.view == g.sizes
    if not whole or not 0 <= dim % len(shape) < len(shape):
        return NotImplemented
    name = f"{v.name}, normalized"
    walk.directions[name] = Direction(g.name, v.name, dim % len(shape))
    out = Ref.whole(name, shape)
    several = isinstance(node.meta.get("val"), (list, tuple))
    return [out, *(Act.constant(other) for other in others)] if several else out
