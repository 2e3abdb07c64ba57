"""`nn.Linear`: every leading axis is a place that shares the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from .affine import AffineBlock
from .base import Block, joined
from .registry import Layer, Use, register


@register(nn.Linear)
class Linear(Layer):
    """a (N, T, I), δ (N, R, T, O)."""

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        inputs = joined([u.input.reshape(len(u.input), 1, -1, u.input.shape[-1]) for u in uses], 2)
        delta = joined(
            [u.delta.reshape(*u.delta.shape[:2], 1, -1, u.delta.shape[-1]) for u in uses], 3
        )
        n, g, t, i = inputs.shape
        return AffineBlock(names["weight"], names["bias"], inputs.__getitem__, (n, g, t, i), delta)
