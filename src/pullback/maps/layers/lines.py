"""Moments of patches where one large product beats many small ones, as it does on a GPU.

All patches of some samples are copied once with the channels last, which moves whole lines of
memory, and multiplied at once. A pointwise convolution's patches are the image itself.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..._core.products import moment, products
from ..._core.space import compute_dtype

_MEMORY = 2**28  # bytes unfolded at a time


def line_moment(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ a aᵀ (1, I, I) and Σ a (1, I) over samples and places, for one group of channels.

    I is channel-major, as in `weight.flatten(1)`. Where the layer has no bias, which alone would
    need it, the second is zero, (1, 1).
    """
    dtype, plain = compute_dtype(x.dtype), module._parameters.get("bias", x) is None
    if set(module.kernel_size) == {1} and not any(module._reversed_padding_repeated_twice):
        if set(module.stride) != {1}:
            x = x[(..., *(slice(None, None, s) for s in module.stride))]
        lines = channel_lines(x)[None]
        return products(lines, lines), _none(x) if plain else lines.sum(2, dtype=dtype)
    k, c = prod(module.kernel_size), x.shape[1]
    pad, mode = module._reversed_padding_repeated_twice, module.padding_mode
    copied = x.numel() * x.element_size() * k // prod(module.stride)
    limit = max(_MEMORY, 4 * (k * c) ** 2 * dtype.itemsize)
    second = first = None
    for some in x.chunk(-(-copied // limit)) if copied > limit else [x]:
        if any(pad):
            some = F.pad(some, pad, "constant" if mode == "zeros" else mode)
        seen = gathered(module, some)
        share = moment(seen)
        second = share if second is None else second.add_(share)
        if not plain:
            ones = seen.sum(0, dtype=dtype)
            first = ones if first is None else first.add_(ones)
    assert second is not None
    second = second.view(k, c, k, c).permute(1, 0, 3, 2).reshape(1, k * c, k * c)
    return second, _none(x) if first is None else first.view(k, c).T.reshape(1, k * c)


def _none(x: Tensor) -> Tensor:
    return x.new_zeros(1, 1, dtype=compute_dtype(x.dtype))


def gathered(module: Any, x: Tensor) -> Tensor:
    """The patches of padded x (B, C, *space), (B·places, kernel·C): offsets before channels."""
    x = x.movedim(1, -1).contiguous()
    shape, strides = [len(x)], [x.stride(0)]
    offsets, steps = [], []
    axes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for i, (k, s, d) in enumerate(axes, start=1):
        shape.append((x.shape[i] - d * (k - 1) - 1) // s + 1)
        strides.append(s * x.stride(i))
        offsets.append(k)
        steps.append(d * x.stride(i))
    wide = x.shape[-1]
    seen = x.as_strided((*shape, *offsets, wide), (*strides, *steps, 1), x.storage_offset())
    return seen.reshape(prod(shape), prod(offsets) * wide)


def channel_lines(x: Tensor) -> Tensor:
    """The channels of (B, C, *space) as lines (C, B·places), not copied where they come last."""
    last = x.movedim(1, -1)
    if last.is_contiguous():
        return last.reshape(-1, x.shape[1]).T
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def by_lines(x: Tensor, groups: int) -> bool:
    """Whether this is the way to go."""
    return groups == 1 and x.device.type != "cpu"
