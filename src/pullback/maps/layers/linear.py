"""`nn.Linear`: every leading axis is a place that shares the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..._core.products import column_gram
from .affine import AffineBlock
from .moments import Moments, Sharing, means, moments, second_moment, stackable, stacked
from .registry import Block, Layer, Seen, Use, joined, register


@register(nn.Linear)
class Linear(Layer):
    """a (N, T, I), δ (N, R, T, O)."""

    use = "linear"
    curvature = "kronecker"

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        inputs = joined([u.input[:, None, None].flatten(2, -2) for u in uses], 2)
        delta = joined([u.delta[:, :, None, None].flatten(3, -2) for u in uses], 3)
        return AffineBlock(names["weight"], names["bias"], inputs, delta)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        if sharing.reduce:
            if keep is None:
                kept = None
            else:
                kept = sharing.by_sample(keep, 0)
            x, kept = means(sharing.by_sample(x), kept)
            return moments(x[None], sharing, kept)
        biased = module._parameters.get("bias", x) is not None
        if keep is None:
            kept = None
        else:
            kept = keep.flatten()
        return moments(x.reshape(1, -1, x.shape[-1]), sharing, kept, first=biased)

    def inputs_of(self, uses: Sequence[Seen], sharing: Sharing) -> list[Moments]:
        """Those with a bias in half precision side by side, by their shape."""
        alike: dict[Any, list[int]] = {}
        for i, (module, x, keep) in enumerate(uses):
            short = x.shape[-1] <= sharing.longest and not sharing.reduce
            if short and module._parameters.get("bias") is not None and stackable(x):
                alike.setdefault((x.shape, x.dtype, x.device, keep is None), []).append(i)
        found: dict[int, Moments] = {}
        for some in alike.values():
            keep = [k for i in some if (k := uses[i][2]) is not None]
            found.update(zip(some, stacked([uses[i][1] for i in some], keep or None), strict=True))
        return [
            found[i] if i in found else self.inputs(module, x, sharing, keep)
            for i, (module, x, keep) in enumerate(uses)
        ]

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if sharing.reduce:
            delta = sharing.by_sample(delta).sum(1)
        rows = delta.reshape(-1, width := delta.shape[-1])
        if width <= sharing.longest:
            return column_gram(rows)[None]
        return second_moment(rows[None], sharing)
