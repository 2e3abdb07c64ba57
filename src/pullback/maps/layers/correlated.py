"""Moments of patches where one large product beats many small ones, as it does on a GPU.

A pointwise convolution's patches are the image itself. Those of a 3×3 convolution that keeps the
image's size follow from one correlation. For others all patches of some samples are copied once
with the channels last, which moves whole lines of memory, and multiplied at once.

The image is zero outside of itself, so a product of two of a patch's entries depends on where they
stand to each other, but for the places whose patch leaves the image. With the correlation R, u and
v the offsets (0, 1 or 2 on each axis) and places s of the image,

    R[d] = Σ_s x[s] x[s + d]ᵀ,        M[u, v] = R[v − u] − Σ_{s not seen at u} x[s] x[s + v − u]ᵀ.

At u = 0 the last line of an axis is not seen, at u = 2 the first one, and x[s + v − u] lies within
the image only where v = u on that axis: so the correction is the moment of that line's own patches.
R[−d] = R[d]ᵀ, and the lower half of R is the weight gradient of a 3×5 convolution whose cotangent
is its input, which takes 15 products of C×C blocks instead of 81, and copies no patch. What follows
is small, and done for all inputs of one shape at once. (On a CPU that is no faster than sliding,
and adds up in a row, with larger errors.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.products import moment, products
from ..._core.space import compute_dtype

_LEAST = 4  # lines of an image, below which it is mostly edge


def correlates(module: Any, x: Tensor) -> bool:
    """Whether this is the way to go, for x (B, C, H, W)."""
    kept = module.kernel_size == (3, 3) and module.stride == module.dilation == (1, 1)
    kept = kept and list(module._reversed_padding_repeated_twice) == [1, 1, 1, 1]
    exact = x.dtype in (torch.float32, torch.float64)  # else the weight gradient is rounded
    large = x.ndim == 4 and x.shape[0] > 0 and min(x.shape[2:]) >= _LEAST
    return kept and module.padding_mode == "zeros" and module.groups == 1 and exact and large


def correlated_moment(x: Tensor) -> Tensor:
    """Σ a aᵀ (9C, 9C) over samples and places, channel-major, for x (B, C, H, W)."""
    return correlated_moments([x])[0]


def correlated_moments(some: Sequence[Tensor]) -> Tensor:
    """The same for several inputs of one shape: (K, 9C, 9C)."""
    k, c = len(some), some[0].shape[1]
    weight = some[0].new_empty(1).expand(c, c, 3, 5)
    with _as_products(weight):
        lower = torch.stack([_correlation(x, weight) for x in some]).contiguous()
    rows = [x[:, :, i] for i in (-1, 0) for x in some]
    columns = [x[..., i] for i in (-1, 0) for x in some]
    return _assembled(lower, _edges(rows, columns, k))


def _assembled(lower: Tensor, edges: Sequence[Tensor]) -> Tensor:
    """M from the lower half of R and the moments of edges."""
    k, c = lower.shape[:2]
    r = torch.cat([lower[..., 1:, :].flip(3, 4).transpose(1, 2), lower], 3).contiguous()
    # at u, v goes through the 3×3 steps of R from 2 − u on: nine pieces that are put side by side
    sizes, steps = (k * c, c, 3, 3), (25 * c, 25, 5, 1)
    pieces = [r.as_strided(sizes, steps, 12 - 5 * i - j) for i in range(3) for j in range(3)]
    m = torch.cat(pieces, 1).view(k, c, 3, 3, c, 3, 3)
    for axis, moments in enumerate(edges):
        along = m.diagonal(0, 2 + axis, 5 + axis)[..., ::2]  # u = v ∈ {0, 2} on this axis
        along -= moments.permute(1, 3, 2, 5, 4, 0)
    return m.view(k, 9 * c, 9 * c)


def _correlation(x: Tensor, weight: Tensor) -> Tensor:
    """R (C, C, 3, 5) at d + (0, 2), d ≥ 0 along columns; of the weight only the shape is used."""
    seen = torch.cat([x, x.new_zeros(*x.shape[:2], 2, x.shape[3])], 2)
    return torch.ops.aten.convolution_backward.default(
        x, seen, weight, None, [1, 1], [0, 2], [1, 1], False, [0, 0], 1, [False, True, False]
    )[1]


def _edges(rows: list[Tensor], columns: list[Tensor], count: int) -> Sequence[Tensor]:
    """Moments (2, K, 3, C, 3, C) of the patches of the rows, and of the columns, each (B, C, L).

    Columns are followed one place beyond both ends of the image, rows are not: otherwise a corner,
    which is on both, would be taken off twice or not at all.
    """
    if rows[0].shape != columns[0].shape:
        return [_moments(_line_patches(rows, 1), count), _moments(_line_patches(columns, 2), count)]
    seen = _line_patches([*rows, *columns], 2)
    seen[: len(rows), ..., :: seen.shape[-1] - 1].zero_()
    return _moments(seen, count).split(2)


def _line_patches(lines: list[Tensor], pad: int) -> Tensor:
    """(E·K, 3, C, B, L + 2·pad − 2)."""
    x = F.pad(torch.stack(lines), (pad, pad))
    return x.unfold(3, x.shape[3] - 2, 1).permute(0, 3, 2, 1, 4).contiguous()


def _moments(seen: Tensor, count: int) -> Tensor:
    lines = seen.flatten(3).flatten(1, 2)
    found = torch.bmm(lines, lines.mT)
    return found.view(-1, count, *seen.shape[1:3], *seen.shape[1:3])


def rounds_apart() -> bool:
    """Whether torch rounds to TF32 in convolutions and not in products, as it does by default."""
    backends: Any = torch.backends
    return (
        backends.cuda.matmul.fp32_precision != "tf32"
        and backends.cudnn.conv.fp32_precision != "ieee"
    )


@contextlib.contextmanager
def _as_products(x: Tensor) -> Iterator[None]:
    """Convolutions as precise as products."""
    if not x.is_cuda or not rounds_apart():
        yield
        return
    backends: Any = torch.backends
    before = backends.cudnn.conv.fp32_precision
    backends.cudnn.conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        backends.cudnn.conv.fp32_precision = before


_MEMORY = 2**27  # bytes unfolded at a time
_ALIGNED = 8  # entries that lines of patches are a multiple of: tensor cores read no others


def line_moment(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ a aᵀ (1, I, I) and Σ a (1, I) over samples and places, for one group of channels.

    I is channel-major, as in `weight.flatten(1)`. Where the layer has no bias, which alone would
    need the second, (1, 1) stands in for it.
    """
    plain = module._parameters.get("bias", x) is None
    if _sees_one(module):
        if set(module.stride) != {1}:
            x = x[(..., *(slice(None, None, s) for s in module.stride))]
        second = channel_moment(x)
        return second, left_out(second) if plain else _channel_sum(x)
    if correlates(module, x):
        second = correlated_moment(x)[None]
        return second, patch_sum(module, x, left_out(second))
    k, c = prod(module.kernel_size), x.shape[1]
    copied = x.nbytes * k // prod(module.stride)
    limit = max(_MEMORY, 4 * (k * c) ** 2 * compute_dtype(x.dtype).itemsize)
    some, *others = _channels_last(module, x).chunk(max(1, -(-copied // limit)))
    second, first = _gathered_moment(module, some, plain)
    for some in others:
        more, ones = _gathered_moment(module, some, plain)
        second += more
        first = None if first is None or ones is None else first.add_(ones)
    second = second.view(k, c, k, c).permute(1, 0, 3, 2).reshape(1, k * c, k * c)
    return second, left_out(second) if first is None else first.view(k, c).T.reshape(1, k * c)


def _gathered_moment(module: Any, x: Tensor, plain: bool) -> tuple[Tensor, Tensor | None]:
    """Σ a aᵀ and Σ a with offsets before channels; the patches are gone with the call."""
    width = prod(module.kernel_size) * x.shape[-1]
    seen = _unfolded(module, x, _ALIGNED)
    second = moment(seen)[:width, :width]
    return second, None if plain else seen[:, :width].sum(0, dtype=second.dtype)


def left_out(second: Tensor) -> Tensor:
    """What stands for Σ a, (1, 1), where nobody needs it."""
    return second[:1, 0, :1]


def _channel_sum(x: Tensor) -> Tensor:
    """(1, C) over samples and places of (B, C, *space)."""
    return x.flatten(2).sum((0, 2), dtype=compute_dtype(x.dtype))[None]


def patch_sum(module: Any, x: Tensor, unneeded: Tensor) -> Tensor:
    """Σ a (1, I), which is linear in x: of the samples' sum; `unneeded` where there is no bias."""
    if module._parameters.get("bias", x) is None:
        return unneeded
    if _sees_one(module):
        return _channel_sum(x)
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
    """Σ x xᵀ (1, C, C) over samples and places of (B, C, *space), by what moves fewer bytes.

    One product per sample copies nothing, but its results are B·C² numbers; one product of all
    needs the channels as lines.
    """
    if _by_samples(x):
        each = x.flatten(2)
        return products(each, each).sum(0, keepdim=True)
    lines = channel_lines(x)[None]
    return products(lines, lines)


def channel_moments(some: Sequence[Tensor]) -> Tensor:
    """The same for several of one shape and row by row in memory, (K, C, C), in fewer launches."""
    x, count = some[0], len(some)
    if count == 1:
        return channel_moment(x)
    if _by_samples(x) and x.dtype != compute_dtype(x.dtype):
        return torch.cat([channel_moment(x) for x in some])
    if _by_samples(x):
        each = x.new_empty(count, x.shape[0], x.shape[1], x.shape[1])
        for out, lines in zip(each.unbind(), (x.flatten(2) for x in some), strict=True):
            torch.bmm(lines, lines.mT, out=out)
        return each.sum(1)
    lines = _turned(some)
    return products(lines, lines)


def _turned(some: Sequence[Tensor]) -> Tensor:
    """The channels of several (B, C, *space) of one shape, each in order, as (K, C, B·places)."""
    c, count = some[0].shape[1], len(some)
    return torch.cat([x.flatten(2).transpose(0, 1) for x in some]).view(count, c, -1)


def channel_bytes(x: Tensor) -> int:
    """What `channel_moments` needs for one of them."""
    each = x.shape[0] * x.shape[1] ** 2 * compute_dtype(x.dtype).itemsize
    return each if _by_samples(x) else x.nbytes


def _by_samples(x: Tensor) -> bool:
    """Whether to multiply sample by sample."""
    n, c, *space = x.shape
    fewer = c * compute_dtype(x.dtype).itemsize <= prod(space) * x.itemsize
    return fewer and n > 1 and x.is_contiguous()


def _unfolded(module: Any, x: Tensor, aligned: int = 1) -> Tensor:
    """The patches of padded (B, *space, C), (B·places, kernel·C): offsets before channels.

    Lines are filled up with zeros to a multiple of `aligned`.
    """
    shape, strides = [x.shape[0]], [x.stride(0)]
    offsets, steps = [], []
    axes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for i, (k, s, d) in enumerate(axes, start=1):
        shape.append((x.shape[i] - d * (k - 1) - 1) // s + 1)
        strides.append(s * x.stride(i))
        offsets.append(k)
        steps.append(d * x.stride(i))
    wide = x.shape[-1]
    seen = x.as_strided((*shape, *offsets, wide), (*strides, *steps, 1), x.storage_offset())
    places, width = prod(shape), prod(offsets) * wide
    if not width % aligned:
        return seen.reshape(places, width)
    out = x.new_empty(places, -(-width // aligned) * aligned)
    out[:, :width].view(seen.shape).copy_(seen)
    out[:, width:].zero_()
    return out


def _channels_last(module: Any, x: Tensor) -> Tensor:
    """Padded, (B, *space, C) in memory, by one copy where it is padded with zeros."""
    pad, mode = module._reversed_padding_repeated_twice, module.padding_mode
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
    """The channels of (B, C, *space) as lines (C, B·places), not copied where they come last."""
    last = x.movedim(1, -1)
    if last.is_contiguous():
        return last.reshape(-1, x.shape[1]).T
    if x.is_contiguous() and x.numel():
        return _turned([x])[0]
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def by_lines(x: Tensor, groups: int) -> bool:
    """Whether this is the way to go."""
    return groups == 1 and x.device.type != "cpu"
