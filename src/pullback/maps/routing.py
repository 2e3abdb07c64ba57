"""Whether a forward pass puts samples where numbers tell it to."""

from __future__ import annotations

from torch import Tensor

from .._core.graph import walk

#: kinds of nodes that read or write places by a tensor of indices, or by a mask
_KINDS = ("Index", "Gather", "Scatter", "Take", "MaskedSelect", "MaskedScatter")


def routed(root: Tensor) -> bool:
    """Whether places are chosen by index on the way to `root`.

    The indices are numbers, which another batch has others of: experts get their samples in
    another order, while the graph has the same nodes.
    """
    return any(node.name().startswith(_KINDS) for node in walk(root.grad_fn))
