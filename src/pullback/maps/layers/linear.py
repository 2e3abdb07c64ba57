"""`nn.Linear`: every leading axis is a place that shares the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .affine import AffineBlock
from .base import Block
from .registry import Layer, Use, register


@register(nn.Linear)
class Linear(Layer):
    """a (N, T, I), δ (N, R, T, O)."""

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        inputs = torch.cat(
            [u.input.reshape(u.input.shape[0], 1, -1, u.input.shape[-1]) for u in uses], 2
        )
        delta = torch.cat(
            [u.delta.reshape(*u.delta.shape[:2], 1, -1, u.delta.shape[-1]) for u in uses], 3
        )
        n, g, t, i = inputs.shape
        return AffineBlock(names["weight"], names["bias"], lambda: inputs, (n, g, t, i), delta)
