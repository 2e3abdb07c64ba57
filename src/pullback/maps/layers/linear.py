"""`nn.Linear`: all leading axes count positions that share the weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..._core.products import column_gram
from .affine import AffineBlock
from .moments import (
    Moments,
    Sharing,
    average_positions,
    can_stack,
    compute_moments,
    compute_second_moment,
    compute_stacked_moments,
)
from .registry import Block, Layer, LayerInput, Use, join_uses, register


@register(nn.Linear)
class Linear(Layer):
    """a (N, T, I), δ (N, R, T, O)."""

    use = "linear"
    curvature = "kronecker"

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        inputs = join_uses([u.input[:, None, None].flatten(2, -2) for u in uses], 2)
        delta = join_uses([u.delta[:, :, None, None].flatten(3, -2) for u in uses], 3)
        return AffineBlock(names["weight"], names["bias"], inputs, delta)

    def input_moments(
        self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None
    ) -> Moments:
        if sharing.reduce:
            if keep is not None:
                keep = sharing.by_sample(keep, 0)
            averages, has_positions = average_positions(sharing.by_sample(x), keep)
            return compute_moments(averages[None], sharing, has_positions)
        if keep is not None:
            keep = keep.flatten()
        has_bias = module._parameters.get("bias", x) is not None
        return compute_moments(x.reshape(1, -1, x.shape[-1]), sharing, keep, first=has_bias)

    def input_moments_of_uses(self, uses: Sequence[LayerInput], sharing: Sharing) -> list[Moments]:
        """Return the moments of several uses, stacked ones of one shape formed together."""
        moments_by_use: dict[int, Moments] = {}
        stacks: dict[Any, list[int]] = {}
        for i, use in enumerate(uses):
            if _can_stack_use(use, sharing):
                x = use.input
                stacks.setdefault((x.shape, x.dtype, x.device, use.keep is None), []).append(i)
            else:
                moments_by_use[i] = self.input_moments(*use[:2], sharing, use.keep)
        for indices in stacks.values():
            inputs = [uses[i].input for i in indices]
            masks = [mask for i in indices if (mask := uses[i].keep) is not None]
            stacked = compute_stacked_moments(inputs, masks or None)
            moments_by_use.update(zip(indices, stacked, strict=True))
        return [moments_by_use[i] for i in range(len(uses))]

    def output_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if sharing.reduce:
            delta = sharing.by_sample(delta).sum(1)
        rows = delta.reshape(-1, delta.shape[-1])
        if rows.shape[-1] <= sharing.longest:
            return column_gram(rows)[None]
        return compute_second_moment(rows[None], sharing)


def _can_stack_use(use: LayerInput, sharing: Sharing) -> bool:
    """Return True for a layer with bias whose half-precision inputs have a full moment matrix."""
    if sharing.reduce or use.input.shape[-1] > sharing.longest:
        return False
    return use.module._parameters.get("bias") is not None and can_stack(use.input)
