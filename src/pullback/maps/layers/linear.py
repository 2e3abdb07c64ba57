"""`nn.Linear`: every leading axis is a place that shares the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..._core.products import moment
from .affine import AffineBlock
from .moments import Moments, Sharing, means, moments, second_moment
from .registry import Block, Layer, Use, joined, register


@register(nn.Linear)
class Linear(Layer):
    """a (N, T, I), δ (N, R, T, O)."""

    curvature = "kronecker"

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        inputs = joined([u.input[:, None, None].flatten(2, -2) for u in uses], 2)
        delta = joined([u.delta[:, :, None, None].flatten(3, -2) for u in uses], 3)
        n, g, t, i = inputs.shape
        return AffineBlock(names["weight"], names["bias"], inputs.__getitem__, (n, g, t, i), delta)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        if sharing.reduce:
            kept = None if keep is None else sharing.by_sample(keep, 0)
            x, kept = means(sharing.by_sample(x), kept)
            return moments(x[None], sharing, kept)
        biased = module._parameters.get("bias", x) is not None
        kept = None if keep is None else keep.flatten()
        return moments(x.reshape(1, -1, x.shape[-1]), sharing, kept, first=biased)

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if sharing.reduce:
            delta = sharing.by_sample(delta).sum(1)
        rows = delta.reshape(-1, width := delta.shape[-1])
        return (
            moment(rows)[None] if width <= sharing.longest else second_moment(rows[None], sharing)
        )
