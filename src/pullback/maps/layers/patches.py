"""What the positions of a convolution see: patches, and their second moments.

The patch at place t is a = (x[c, t + u])₍c,u₎, with u the kernel's offsets in the padded image x. A
pointwise convolution's patches are the image itself. Of others, all patches of some samples are
copied with the channels last, which moves whole lines of memory, and multiplied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.products import column_gram, multiply_batches
from ..._core.space import compute_dtype

_MEMORY = 2**27  # bytes unfolded at a time
_ALIGNED = 8  # entries that lines of patches are a multiple of: tensor cores read no others


def patches(module: Any, x: Tensor) -> Tensor:
    """The inputs (B, G, positions, C/G·kernel) that each output place sees, channel-major."""
    pad = module._reversed_padding_repeated_twice
    mode = module.padding_mode
    return windows(module, F.pad(x, pad, "constant" if mode == "zeros" else mode))


def windows(module: Any, x: Tensor) -> Tensor:
    """The same of an input that is already padded."""
    axes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (k, s, d) in enumerate(axes, start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    # (B, C, *positions, *kernel) -> (B, G, *positions, C/G, *kernel)
    dims = len(module.kernel_size)
    x = x.unflatten(1, (module.groups, -1)).movedim(2, 2 + dims)
    return x.flatten(2 + dims).flatten(2, 1 + dims)


def lines(module: Any, x: Tensor) -> Tensor:
    """The channels (B, G, positions, C/G) at each place of (B, C, *space)."""
    return x.unflatten(1, (module.groups, -1)).flatten(3).mT


def of_samples(form: Callable[[Tensor], Tensor], x: Tensor, lead: int, dims: int) -> Tensor:
    """What `form` makes of (B, C, *space), (B, G, positions, n), for (*lead, *calls, C, *space).

    The positions of all calls come one after the other: (*lead, G, T, n). `dims` counts C and
    space.
    """
    found = form(x.reshape(-1, *x.shape[-dims:])).unflatten(0, (*x.shape[:lead], -1))
    return found.transpose(lead, lead + 1).flatten(lead + 1, lead + 2)


def patch_moment(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ a aᵀ (1, I, I) and Σ a (1, I) over samples and positions, for one group of channels.

    I is channel-major, as in `weight.flatten(1)`. Half precision is accumulated in float32, and
    the result stays there. Where the layer has no bias, which alone would need the second, (1, 1)
    stands in for it.
    """
    if _sees_one(module):
        x = x[(..., *(slice(None, None, s) for s in module.stride))]
        second = channel_moment(x)
        return second, patch_sum(module, x, second)
    k = prod(module.kernel_size)
    c = x.shape[1]
    copied = x.nbytes * k // prod(module.stride)
    # sums over few samples would move the moments more often than the inputs
    limit = max(_MEMORY, 4 * (k * c) ** 2 * compute_dtype(x.dtype).itemsize)
    some, *others = _channels_last(module, x).chunk(max(1, -(-copied // limit)))
    second = _line_moment(module, some)
    for some in others:
        second += _line_moment(module, some)
    second = second.view(k, c, k, c).permute(1, 0, 3, 2).reshape(1, k * c, k * c)
    return second, patch_sum(module, x, second)


def _line_moment(module: Any, x: Tensor) -> Tensor:
    """Σ a aᵀ with offsets before channels; the patches are gone with the call."""
    width = prod(module.kernel_size) * x.shape[-1]
    return column_gram(_unfolded(module, x, _ALIGNED))[:width, :width]


def patch_sum(module: Any, x: Tensor, second: Tensor) -> Tensor:
    """Σ a (1, I), which is linear in x: of the samples' sum; (1, 1) where there is no bias."""
    if module._parameters.get("bias", x) is None:
        return second[:1, 0, :1]
    if _sees_one(module):
        return x.flatten(2).sum((0, 2), dtype=compute_dtype(x.dtype))[None]
    alone = x.sum(0, keepdim=True, dtype=compute_dtype(x.dtype))
    seen = _unfolded(module, _channels_last(module, alone)).sum(0)
    return seen.view(-1, x.shape[1]).T.reshape(1, -1)


def pointwise(module: Any, x: Tensor) -> bool:
    """Whether the patches are the image x (B, C, *space) itself, as it lies in memory."""
    plain = x.ndim == 2 + len(module.kernel_size) and x.is_contiguous() and x.numel() > 0
    return plain and _sees_one(module) and set(module.stride) == {1}


def _sees_one(module: Any) -> bool:
    return set(module.kernel_size) == {1} and not any(module._reversed_padding_repeated_twice)


def channel_moment(x: Tensor) -> Tensor:
    """Σ x xᵀ (1, C, C) over samples and positions of (B, C, *space), by what moves fewer bytes.

    One product per sample copies nothing, but its results are B·C² numbers; one product of all
    needs the channels as lines.
    """
    if _by_samples(x):
        each = x.flatten(2)
        return multiply_batches(each, each).sum(0, keepdim=True)
    found = channel_lines(x)[None]
    return multiply_batches(found, found)


def channel_moments(some: Sequence[Tensor]) -> Tensor:
    """The same for several of one shape and row by row in memory, (K, C, C), in fewer launches."""
    x = some[0]
    count = len(some)
    if count == 1 or (_by_samples(x) and x.dtype != compute_dtype(x.dtype)):
        return torch.cat([channel_moment(x) for x in some])
    if _by_samples(x):
        each = x.new_empty(count, x.shape[0], x.shape[1], x.shape[1])
        for out, found in zip(each.unbind(), (x.flatten(2) for x in some), strict=True):
            torch.bmm(found, found.mT, out=out)
        return each.sum(1)
    found = _turned(some)
    return multiply_batches(found, found)


def _turned(some: Sequence[Tensor]) -> Tensor:
    """The channels of several (B, C, *space) of one shape, each in order: (K, C, B·positions)."""
    c = some[0].shape[1]
    count = len(some)
    return torch.cat([x.flatten(2).transpose(0, 1) for x in some]).view(count, c, -1)


def channel_bytes(x: Tensor) -> int:
    """Return the bytes that `channel_moments` takes per input."""
    each = x.shape[0] * x.shape[1] ** 2 * compute_dtype(x.dtype).itemsize
    if _by_samples(x):
        return each
    return x.nbytes


def _by_samples(x: Tensor) -> bool:
    """Whether to multiply sample by sample."""
    n, c, *space = x.shape
    fewer = c * compute_dtype(x.dtype).itemsize <= prod(space) * x.itemsize
    return fewer and n > 1 and x.is_contiguous()


def _unfolded(module: Any, x: Tensor, aligned: int = 1) -> Tensor:
    """The patches of padded (B, *space, C), (B·positions, kernel·C): offsets before channels.

    Lines are filled up with zeros to a multiple of `aligned`.
    """
    shape = [x.shape[0]]
    strides = [x.stride(0)]
    offsets = []
    steps = []
    axes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for i, (k, s, d) in enumerate(axes, start=1):
        shape.append((x.shape[i] - d * (k - 1) - 1) // s + 1)
        strides.append(s * x.stride(i))
        offsets.append(k)
        steps.append(d * x.stride(i))
    wide = x.shape[-1]
    seen = x.as_strided((*shape, *offsets, wide), (*strides, *steps, 1), x.storage_offset())
    positions = prod(shape)
    width = prod(offsets) * wide
    if not width % aligned:
        return seen.reshape(positions, width)
    out = x.new_empty(positions, -(-width // aligned) * aligned)
    out[:, :width].view(seen.shape).copy_(seen)
    out[:, width:].zero_()
    return out


def _channels_last(module: Any, x: Tensor) -> Tensor:
    """Padded, (B, *space, C) in memory, by one copy where it is padded with zeros."""
    pad = module._reversed_padding_repeated_twice
    mode = module.padding_mode
    if not any(pad):
        return x.movedim(1, -1).contiguous()
    if mode != "zeros":
        return F.pad(x, pad, mode).movedim(1, -1).contiguous()
    sides = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    space = [n + before + after for n, (before, after) in zip(x.shape[2:], sides, strict=True)]
    out = inner = x.new_zeros(x.shape[0], *space, x.shape[1])
    for axis, (before, _) in enumerate(sides, start=1):
        inner = inner.narrow(axis, before, x.shape[1 + axis])
    inner.copy_(x.movedim(1, -1))
    return out


def channel_lines(x: Tensor) -> Tensor:
    """The channels of (B, C, *space) as lines (C, B·positions), not copied where they come last."""
    last = x.movedim(1, -1)
    if last.is_contiguous():
        return last.reshape(-1, x.shape[1]).T
    if x.is_contiguous() and x.numel():
        return _turned([x])[0]
    return x.transpose(0, 1).reshape(x.shape[1], -1)
