"""Whether a forward pass puts samples where numbers tell it to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

#: kinds of nodes that read or write places by a tensor of indices, or by a mask
_KINDS = ("Index", "Gather", "Scatter", "Take", "MaskedSelect", "MaskedScatter")


def routed(root: Tensor) -> bool:
    """Whether places are chosen by index on the way to `root`.

    The indices are numbers, which another batch has others of: experts get their samples in
    another order, while the graph has the same nodes.
    """
    ahead: list[Any] = [root.grad_fn]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        if node is None:
            continue
        if node.name().startswith(_KINDS):
            return True
        following = {n for n, _ in node.next_functions} - seen
        seen |= following
        ahead += following
    return False
