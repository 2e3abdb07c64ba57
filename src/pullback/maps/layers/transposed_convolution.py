r"""Transposed convolutions: the roles of input and cotangent are exchanged.

Input place t reaches the output positions s = t·stride − padding + κ·dilation, so with the
cotangents that it meets there, d_t = (δ[o, s])_{oκ} of width C_out/G·kernel,

    z[o, s] = b_o + Σ_t Σ_i W[i, o, κ] a_t[i]
    row     = Σ_t a_t ⊗ d_t   for the weight (C_in, C_out/G, *kernel),      Σ_s δ_s   for the bias.

So the weight is affine with the *input's* positions as sharing axis, and patches of the cotangent.
The bias meets every output place once, a patch not: it has rows of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .affine import AffineBlock
from .moments import Moments, Sharing, counted, shared_moments, shared_second_moment
from .patches import lines, of_samples, windows
from .registry import Block, JointBlock, Layer, RowsBlock, Use, joined, register


def _patches(module: Any, delta: Tensor, positions: Sequence[int]) -> Tensor:
    """What each input position reaches: (B, C_out, *outputs) -> (B, G, inputs, C_out/G·kernel)."""
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
    return windows(module, F.pad(delta, pad))


def _sample_patches(use: Use) -> Tensor:
    """(N, R, *calls, C_out, *positions') -> (N, R, G, T, C_out/G·kernel)."""
    positions = use.input.shape[1 - use.features :]
    return of_samples(lambda d: _patches(use.module, d, positions), use.delta, 2, use.features)


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTranspose(Layer):
    """`output_padding` and `output_size` need no care: the cotangent has the output's shape."""

    use = "transposed_convolution"
    curvature = "kronecker"
    input_first = True
    joint = False

    def features(self, module: Any, ndim: int) -> int:
        return 1 + len(module.kernel_size)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        weight = names["weight"]
        bias = names["bias"]
        parts: list[Block] = []
        if weight is not None:
            inputs = joined(
                [of_samples(partial(lines, u.module), u.input, 1, u.features) for u in uses], 2
            )
            delta = joined([_sample_patches(u) for u in uses], 3)
            parts.append(AffineBlock(weight, None, inputs, delta, is_transposed=True))
        if bias is not None:
            positions = [use.delta.movedim(-use.features, 2).flatten(3) for use in uses]
            shifts = [delta.sum(3) for delta in positions]  # Σ_s δ_s: (N, R, C_out)
            parts.append(RowsBlock({bias: sum(shifts[1:], shifts[0])}))
        if len(parts) == 1:
            return parts[0]
        return JointBlock(parts)

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        """Of the input's positions (B, *positions), those that reach a cotangent, or are kept."""
        dims = len(module.kernel_size)
        if delta.ndim != 2 + dims:
            delta = delta[None]
        if keep.ndim == 1:
            return counted(delta.flatten(1), keep)
        reached = delta.unflatten(1, (module.groups, -1)).any(2)
        reached = _patches(module, reached, x.shape[-dims:]).movedim(1, 2).flatten(2)
        return counted(reached.unflatten(1, x.shape[-dims:]), keep)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        a = lines(module, x if x.ndim == 2 + len(module.kernel_size) else x[None])
        return shared_moments(a, sharing, keep)

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        dims = len(module.kernel_size)
        if delta.ndim != 2 + dims:
            delta = delta[None]
        return shared_second_moment(_patches(module, delta, x.shape[-dims:]), sharing)

    def shifts(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        dims = len(module.kernel_size)
        d = (delta if delta.ndim == 2 + dims else delta[None]).flatten(2)
        return shared_second_moment(d.mT[:, None], sharing)
