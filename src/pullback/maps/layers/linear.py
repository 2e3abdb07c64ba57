"""`nn.Linear`: every leading axis is a place that shares the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .affine import AffineBlock
from .base import Block, joined
from .moments import Moments, Sharing, moments, second_moment
from .registry import Layer, Use, register


@register(nn.Linear)
class Linear(Layer):
    """a (N, T, I), δ (N, R, T, O)."""

    curvature = "kronecker"

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        inputs = joined([u.input.reshape(len(u.input), 1, -1, u.input.shape[-1]) for u in uses], 2)
        delta = joined(
            [u.delta.reshape(*u.delta.shape[:2], 1, -1, u.delta.shape[-1]) for u in uses], 3
        )
        n, g, t, i = inputs.shape
        return AffineBlock(names["weight"], names["bias"], inputs.__getitem__, (n, g, t, i), delta)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        if sharing.reduce:
            return moments(sharing.by_sample(x).mean(1)[None], sharing)
        if keep is not None:
            keep = keep.flatten() if keep.shape == x.shape[:-1] else None
        biased = module._parameters.get("bias", x) is not None
        return moments(x.reshape(1, -1, x.shape[-1]), sharing, keep, first=biased)

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if sharing.reduce:
            delta = sharing.by_sample(delta).sum(1)
        return second_moment(delta.reshape(1, -1, delta.shape[-1]), sharing)
