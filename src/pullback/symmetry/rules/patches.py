"""Rules for patches of images as columns, and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from ..graph.values import Act
from ..graph.walk import Walk, rule, shapes
from .structural import operation


@rule("im2col")
def unfolded(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Act:
    """(N, C, H, W) to (N, C·k, L): entries are moved about, zeros are put around."""
    take, rest = operation(node), args[1:]

    def moved(labels: Tensor) -> Tensor:
        # counted from 1, so that what is put around is one less than all labels: −1
        return take((labels + 1).double(), *rest, **kwargs).long() - 1

    return walk.act(args[0]).moved(moved)


@rule("col2im")
def folded(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Act:
    """(N, C·k, L) to (N, C, H, W): sums of entries of one channel."""
    act, shape = walk.act(args[0]), shapes(node)[0]
    walk.touch(act)
    channels = shape[-3]
    parts = act.scale.unflatten(-2, (channels, -1))  # (…, C, k, L)
    merged = walk.scales.merge(parts, [parts.ndim - 2, parts.ndim - 1])
    return Act.of(merged.expand(*parts.shape[:-2], 1, 1), shape)
