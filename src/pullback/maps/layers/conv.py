"""Convolutions of one to three dimensions, with groups, stride, dilation and any padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .affine import AffineBlock
from .base import Block, joined
from .registry import Layer, Use, register


def patches(module: Any, x: Tensor) -> Tensor:
    """The inputs (B, G, places, C/G·kernel) that each output place sees, channel-major."""
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    pad = module._reversed_padding_repeated_twice
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, pad, mode=mode) if any(pad) else x
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    # (B, C, *places, *kernel) -> (B, G, *places, C/G, *kernel)
    dims, groups = len(kernel), module.groups
    x = x.unflatten(1, (groups, -1)).movedim(2, 2 + dims)
    return x.flatten(2 + dims).flatten(2, 1 + dims)


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Layer):
    """An affine layer on patches; the output's places are the sharing axis."""

    def features(self, module: Any, ndim: int) -> int:
        return 1 + len(module.kernel_size)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:

        def inputs(some: slice) -> Tensor:
            return joined([_input(u, u.input[some]) for u in uses], 2)

        delta = joined([_delta(u) for u in uses], 3)
        n, _, g, t, _ = delta.shape
        module = uses[0].module
        width = module.in_channels // module.groups * prod(module.kernel_size)
        return AffineBlock(names["weight"], names["bias"], inputs, (n, g, t, width), delta)


def _input(use: Use, x: Tensor) -> Tensor:
    """(N, *calls, C, *space) -> (N, G, T, I)."""
    n, dims = x.shape[0], use.features
    x = patches(use.module, x.reshape(-1, *x.shape[-dims:]))
    x = x.unflatten(0, (n, -1))  # (N, calls, G, places, I)
    return x.transpose(1, 2).flatten(2, 3)


def _delta(use: Use) -> Tensor:
    """(N, R, *calls, O, *space) -> (N, R, G, T, O/G)."""
    (n, r), dims = use.delta.shape[:2], use.features
    groups = use.module.groups
    d = use.delta.reshape(n, r, -1, *use.delta.shape[-dims:])
    d = d.unflatten(3, (groups, -1)).flatten(5)  # (N, R, calls, G, O, places)
    return d.permute(0, 1, 3, 2, 5, 4).flatten(3, 4)
