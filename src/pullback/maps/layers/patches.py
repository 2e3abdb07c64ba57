"""What the positions of a convolution see: patches, and their second moments.

The patch at position t is a = (x[c, t + u])₍c,u₎, with the kernel's offsets u in the padded image
x. A pointwise convolution's patches are the image itself. For others, all patches of some samples
are copied with the channels last, which moves whole lines of memory, and multiplied at once.
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

_MEMORY = 2**25  # bytes unfolded at a time, while all activations of the network are alive
_ALIGNED = 8  # entries that lines of patches are a multiple of: tensor cores read no others


def unfold_patches(module: Any, x: Tensor) -> Tensor:
    """Return the inputs that each output position sees, (B, G, positions, C/G·kernel).

    A patch is channel-major.
    """
    pad = module._reversed_padding_repeated_twice
    mode = module.padding_mode
    if mode == "zeros":
        mode = "constant"
    return unfold_windows(module, F.pad(x, pad, mode))


def unfold_windows(module: Any, x: Tensor) -> Tensor:
    """Return the patches (B, G, positions, C/G·kernel) of an input that is already padded."""
    axes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (k, s, d) in enumerate(axes, start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    # (B, C, *positions, *kernel) -> (B, G, *positions, C/G, *kernel)
    dims = len(module.kernel_size)
    x = x.unflatten(1, (module.groups, -1)).movedim(2, 2 + dims)
    return x.flatten(2 + dims).flatten(2, 1 + dims)


def list_channels(module: Any, x: Tensor) -> Tensor:
    """Return the channels at each position of (B, C, *space), as (B, G, positions, C/G)."""
    return x.unflatten(1, (module.groups, -1)).flatten(3).mT


def apply_to_images(form: Callable[[Tensor], Tensor], x: Tensor, lead: int, dims: int) -> Tensor:
    """Apply `form`, (B, C, *space) -> (B, G, positions, n), to (*lead, *calls, C, *space).

    Returns (*lead, G, T, n), the positions of all calls one after the other. `dims` counts the axes
    C and space.
    """
    formed = form(x.reshape(-1, *x.shape[-dims:])).unflatten(0, (*x.shape[:lead], -1))
    return formed.transpose(lead, lead + 1).flatten(lead + 1, lead + 2)


def compute_patch_moment(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ a aᵀ (1, I, I) and Σ a (1, I) over samples and positions, for one group.

    I is channel-major, as in `weight.flatten(1)`. Half precision is accumulated in float32, and
    the result has that dtype. Only a bias needs the second: without one it is a placeholder (1, 1).
    """
    if _has_single_pixels(module):
        x = x[(..., *(slice(None, None, s) for s in module.stride))]
        second = compute_channel_moment(x)
        return second, compute_first_moment(module, x, second)
    k = prod(module.kernel_size)
    c = x.shape[1]
    copied = x.nbytes * k // prod(module.stride)
    # sums over few samples would move the moments more often than the inputs
    limit = max(_MEMORY, 4 * (k * c) ** 2 * compute_dtype(x.dtype).itemsize)
    chunk, *others = x.chunk(max(1, -(-copied // limit)))
    second = _offset_major_moment(module, chunk)
    for chunk in others:
        second += _offset_major_moment(module, chunk)
    second = second.view(k, c, k, c).permute(1, 0, 3, 2).reshape(1, k * c, k * c)
    return second, compute_first_moment(module, x, second)


def _offset_major_moment(module: Any, x: Tensor) -> Tensor:
    """Return Σ a aᵀ of (B, C, *space), the kernel's offsets before the channels.

    The call ends the life of the patches, so that those of the next samples take their memory.
    """
    width = prod(module.kernel_size) * x.shape[1]
    patches = _unfold(module, _pad_channels_last(module, x), _ALIGNED)
    return column_gram(patches)[:width, :width]


def compute_first_moment(module: Any, x: Tensor, second: Tensor) -> Tensor:
    """Return Σ a (1, I), or a placeholder (1, 1) if the layer has no bias.

    Only a bias needs the first moment. The placeholder is a view of the second one, Σ a aᵀ, which
    takes no memory and no launch.
    """
    if module._parameters.get("bias", x) is None:
        return second[:1, 0, :1]
    return _sum_patches(module, x)


def _sum_patches(module: Any, x: Tensor) -> Tensor:
    """Return Σ a (1, I) over samples and positions.

    The sum is linear in x, so it is formed from the sum of the samples.
    """
    if _has_single_pixels(module):
        return x.flatten(2).sum((0, 2), dtype=compute_dtype(x.dtype))[None]
    sample_sum = x.sum(0, keepdim=True, dtype=compute_dtype(x.dtype))
    patch_total = _unfold(module, _pad_channels_last(module, sample_sum)).sum(0)
    return patch_total.view(-1, x.shape[1]).T.reshape(1, -1)


def is_pointwise(module: Any, x: Tensor) -> bool:
    """Return True if the patches are the image x (B, C, *space) itself, as it lies in memory."""
    is_dense_batch = x.ndim == 2 + len(module.kernel_size) and x.is_contiguous() and x.numel() > 0
    return is_dense_batch and _has_single_pixels(module) and set(module.stride) == {1}


def _has_single_pixels(module: Any) -> bool:
    """Return True if a patch is one pixel, and no patch lies in the padding."""
    return set(module.kernel_size) == {1} and not any(module._reversed_padding_repeated_twice)


def compute_channel_moment(x: Tensor) -> Tensor:
    """Return Σ x xᵀ (1, C, C) over samples and positions of (B, C, *space).

    One product per sample copies nothing, but its results are B·C² numbers; one product of all
    needs the channels as lines. The function takes what moves fewer bytes.
    """
    if _should_multiply_by_sample(x):
        samples = x.flatten(2)
        return multiply_batches(samples, samples).sum(0, keepdim=True)
    channels = flatten_to_channel_rows(x)[None]
    return multiply_batches(channels, channels)


def compute_channel_moments(images: Sequence[Tensor]) -> Tensor:
    """Return the `compute_channel_moment` of several contiguous inputs of one shape, (K, C, C).

    It takes fewer launches than one call for each.
    """
    x = images[0]
    count = len(images)
    by_sample = _should_multiply_by_sample(x)
    if count == 1 or (by_sample and x.dtype != compute_dtype(x.dtype)):
        return torch.cat([compute_channel_moment(x) for x in images])
    if by_sample:
        products = x.new_empty(count, x.shape[0], x.shape[1], x.shape[1])
        for out, image in zip(products.unbind(), images, strict=True):
            samples = image.flatten(2)
            torch.bmm(samples, samples.mT, out=out)
        return products.sum(1)
    channels = _stack_channels(images)
    return multiply_batches(channels, channels)


def _stack_channels(images: Sequence[Tensor]) -> Tensor:
    """Return the channels of several (B, C, *space) of one shape, (K, C, B·positions)."""
    channels = torch.cat([x.flatten(2).transpose(0, 1) for x in images])
    return channels.view(len(images), images[0].shape[1], -1)


def count_channel_bytes(x: Tensor) -> int:
    """Return the bytes that `compute_channel_moments` takes per input."""
    if _should_multiply_by_sample(x):
        return x.shape[0] * x.shape[1] ** 2 * compute_dtype(x.dtype).itemsize
    return x.nbytes


def _should_multiply_by_sample(x: Tensor) -> bool:
    """Return True if one product per sample moves fewer bytes than one product of all."""
    n, c, *space = x.shape
    is_smaller = c * compute_dtype(x.dtype).itemsize <= prod(space) * x.itemsize
    return is_smaller and n > 1 and x.is_contiguous()


def _unfold(module: Any, x: Tensor, multiple: int = 1) -> Tensor:
    """Return the patches of padded (B, *space, C), (B·positions, kernel·C).

    The kernel's offsets come before the channels, and zeros fill up the lines to a multiple of
    `multiple` entries.
    """
    positions = [x.shape[0]]
    position_strides = [x.stride(0)]
    offset_strides = []
    axes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for i, (k, s, d) in enumerate(axes, start=1):
        positions.append((x.shape[i] - d * (k - 1) - 1) // s + 1)
        position_strides.append(s * x.stride(i))
        offset_strides.append(d * x.stride(i))
    channels = x.shape[-1]
    windows = x.as_strided(
        (*positions, *module.kernel_size, channels),
        (*position_strides, *offset_strides, 1),
        x.storage_offset(),
    )
    count = prod(positions)
    width = prod(module.kernel_size) * channels
    if not width % multiple:
        return windows.reshape(count, width)
    out = x.new_empty(count, -(-width // multiple) * multiple)
    out[:, :width].view(windows.shape).copy_(windows)
    out[:, width:].zero_()
    return out


def _pad_channels_last(module: Any, x: Tensor) -> Tensor:
    """Return the padded input as (B, *space, C) in memory, by one copy if padded with zeros."""
    pad = module._reversed_padding_repeated_twice
    mode = module.padding_mode
    if not any(pad):
        return x.movedim(1, -1).contiguous()
    if mode != "zeros":
        return F.pad(x, pad, mode).movedim(1, -1).contiguous()
    sides = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    space = [n + before + after for n, (before, after) in zip(x.shape[2:], sides, strict=True)]
    out = x.new_zeros(x.shape[0], *space, x.shape[1])
    inner = out
    for axis, (before, _) in enumerate(sides, start=1):
        inner = inner.narrow(axis, before, x.shape[1 + axis])
    inner.copy_(x.movedim(1, -1))
    return out


def flatten_to_channel_rows(x: Tensor) -> Tensor:
    """Return (B, C, *space) as (C, B·positions), a view if the channels come last in memory."""
    channels_last = x.movedim(1, -1)
    if channels_last.is_contiguous():
        return channels_last.reshape(-1, x.shape[1]).T
    if x.is_contiguous() and x.numel():
        return _stack_channels([x])[0]
    return x.transpose(0, 1).reshape(x.shape[1], -1)
