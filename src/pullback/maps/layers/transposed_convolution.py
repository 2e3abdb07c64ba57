r"""Transposed convolutions: the roles of input and cotangent are exchanged.

Input position t reaches the output positions s = t·stride − padding + κ·dilation, so with the
cotangents that it meets there, d_t = (δ[o, s])_{oκ} of width C_out/G·kernel,

    z[o, s] = b_o + Σ_t Σ_i W[i, o, κ] a_t[i]
    row     = Σ_t a_t ⊗ d_t   for the weight (C_in, C_out/G, *kernel),      Σ_s δ_s   for the bias.

So the weight is affine with the *input's* positions as sharing axis, and patches of the cotangent.
The bias meets each output position once, unlike a patch, so it has rows of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .affine import AffineBlock
from .moments import (
    Moments,
    Sharing,
    compute_shared_moments,
    compute_shared_second_moment,
    find_kept_or_reached_positions,
)
from .patches import apply_to_images, list_channels, unfold_windows
from .registry import Block, JointBlock, Layer, RowsBlock, Use, join_uses, register


def _unfold_reached(module: Any, delta: Tensor, positions: Sequence[int]) -> Tensor:
    """Return the outputs that each input position reaches, (B, G, inputs, C_out/G·kernel).

    `delta` is (B, C_out, *outputs), and `positions` the input's positions along each axis.
    """
    pad: list[int] = []
    sizes = zip(
        delta.shape[2:],
        positions,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        strict=True,
    )
    for out, t, k, s, p, d in sizes:
        reach = (t - 1) * s + d * (k - 1) + 1
        pad = [p, reach - p - out, *pad]  # negative where output padding lies beyond any input
    return unfold_windows(module, F.pad(delta, pad))


def _unfold_cotangents(use: Use) -> Tensor:
    """Return cotangents (N, R, *calls, C_out, *positions') as (N, R, G, T, C_out/G·kernel)."""
    positions = use.input.shape[1 - use.features :]
    return apply_to_images(
        lambda d: _unfold_reached(use.module, d, positions), use.delta, 2, use.features
    )


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTranspose(Layer):
    """`output_padding` and `output_size` need no care: the cotangent has the output's shape."""

    use = "transposed_convolution"
    curvature = "kronecker"
    input_first = True
    joint = False

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        return 1 + len(module.kernel_size)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        weight = names["weight"]
        bias = names["bias"]
        blocks: list[Block] = []
        if weight is not None:
            channels = []
            for use in uses:
                form = partial(list_channels, use.module)
                channels.append(apply_to_images(form, use.input, 1, use.features))
            inputs = join_uses(channels, 2)
            delta = join_uses([_unfold_cotangents(use) for use in uses], 3)
            blocks.append(AffineBlock(weight, None, inputs, delta, is_transposed=True))
        if bias is not None:
            positions = [use.delta.movedim(-use.features, 2).flatten(3) for use in uses]
            shifts = [delta.sum(3) for delta in positions]  # Σ_s δ_s: (N, R, C_out)
            blocks.append(RowsBlock({bias: sum(shifts[1:], shifts[0])}))
        if len(blocks) == 1:
            return blocks[0]
        return JointBlock(blocks)

    def counted_positions(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        """Of the input's positions (B, *positions), those that reach a cotangent, or are kept."""
        dims = len(module.kernel_size)
        if delta.ndim != 2 + dims:
            delta = delta[None]
        if keep.ndim == 1:
            return find_kept_or_reached_positions(delta.flatten(1), keep)
        reached = delta.unflatten(1, (module.groups, -1)).any(2)
        reached = _unfold_reached(module, reached, x.shape[-dims:]).movedim(1, 2).flatten(2)
        return find_kept_or_reached_positions(reached.unflatten(1, x.shape[-dims:]), keep)

    def input_moments(
        self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None
    ) -> Moments:
        if x.ndim != 2 + len(module.kernel_size):
            x = x[None]
        return compute_shared_moments(list_channels(module, x), sharing, keep)

    def output_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        dims = len(module.kernel_size)
        if delta.ndim != 2 + dims:
            delta = delta[None]
        return compute_shared_second_moment(
            _unfold_reached(module, delta, x.shape[-dims:]), sharing
        )

    def bias_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if delta.ndim != 2 + len(module.kernel_size):
            delta = delta[None]
        return compute_shared_second_moment(delta.flatten(2).mT[:, None], sharing)
