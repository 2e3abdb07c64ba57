"""Moments of 3×3 patches from one correlation of the image with itself, for a GPU.

The image is zero outside of itself, so that the product of two entries of a patch depends on where
they stand to each other, except at positions whose patch leaves the image. With the correlation R,
offsets u and v (0, 1 or 2 on each axis) and positions s of the image,

    R[d] = Σ_s x[s] x[s + d]ᵀ,        M[u, v] = R[v − u] − Σ_{s not seen at u} x[s] x[s + v − u]ᵀ.

At u = 0 the last line of an axis is not seen, at u = 2 the first one, and x[s + v − u] lies within
the image only if v = u on that axis: the correction is the moment of that line's own patches.
R[−d] = R[d]ᵀ, and the lower half of R is the weight gradient of a 3×5 convolution whose cotangent
is its input. It takes 15 products of C×C blocks instead of 81, and copies no patch. On ResNet-50
and an H200 a step with statistics takes 2.07 SGD steps of GPU time by it, and 2.36 without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: lines of an image, below which it is mostly edge
_LEAST_LINES = 4


def can_correlate(module: Any, x: Tensor) -> bool:
    """Return True for a 3×3 convolution of stride 1 with one line of zeros around x (B, C, H, W).

    Half precision is excluded: its weight gradients are rounded.
    """
    if module.kernel_size != (3, 3) or module.stride != (1, 1) or module.dilation != (1, 1):
        return False
    if module.padding_mode != "zeros" or module.groups != 1:
        return False
    if list(module._reversed_padding_repeated_twice) != [1, 1, 1, 1]:
        return False
    is_large = x.ndim == 4 and x.shape[0] > 0 and min(x.shape[2:]) >= _LEAST_LINES
    return is_large and x.dtype in (torch.float32, torch.float64)


def correlate_patches(inputs: Sequence[Tensor]) -> Tensor:
    """Return Σ a aᵀ (K, 9C, 9C) over samples and positions, channel-major, of K inputs.

    The inputs (B, C, H, W) have one shape.
    """
    count = len(inputs)
    channels = inputs[0].shape[1]
    weight = inputs[0].new_empty(1).expand(channels, channels, 3, 5)
    with _in_precision_of_products(weight):
        lower = torch.stack([_correlate(x, weight) for x in inputs]).contiguous()
    rows = [x[:, :, -1] for x in inputs] + [x[:, :, 0] for x in inputs]
    columns = [x[..., -1] for x in inputs] + [x[..., 0] for x in inputs]
    return _assemble(lower, _edge_moments(rows, columns, count))


def count_correlation_bytes(x: Tensor) -> int:
    """Return the bytes of the moments of one input."""
    return (9 * x.shape[1]) ** 2 * x.element_size()


def _assemble(lower: Tensor, edges: Sequence[Tensor]) -> Tensor:
    """Return M from the lower half of R, (K, C, C, 3, 5), and the moments of edges."""
    count, channels = lower.shape[:2]
    upper = lower[..., 1:, :].flip(3, 4).transpose(1, 2)
    correlation = torch.cat([upper, lower], 3).contiguous()
    # at u, v goes through the 3×3 steps of R from 2 − u on: nine pieces that are put side by side
    sizes = (count * channels, channels, 3, 3)
    strides = (25 * channels, 25, 5, 1)
    starts = [12, 11, 10, 7, 6, 5, 2, 1, 0]
    pieces = [correlation.as_strided(sizes, strides, start) for start in starts]
    moments = torch.cat(pieces, 1).view(count, channels, 3, 3, channels, 3, 3)
    for axis, edge in enumerate(edges):
        both_ends = moments.diagonal(0, 2 + axis, 5 + axis)[..., ::2]  # u = v ∈ {0, 2} on this axis
        both_ends -= edge.permute(1, 3, 2, 5, 4, 0)
    return moments.view(count, 9 * channels, 9 * channels)


def _correlate(x: Tensor, weight: Tensor) -> Tensor:
    """Return R (C, C, 3, 5) at d + (0, 2), d ≥ 0 along columns; of the weight the shape is used."""
    padded = torch.cat([x, x.new_zeros(*x.shape[:2], 2, x.shape[3])], 2)
    _, weight_gradient, _ = torch.ops.aten.convolution_backward.default(
        x, padded, weight, None, [1, 1], [0, 2], [1, 1], False, [0, 0], 1, [False, True, False]
    )
    return weight_gradient


def _edge_moments(rows: list[Tensor], columns: list[Tensor], count: int) -> Sequence[Tensor]:
    """Return the moments (2, K, 3, C, 3, C) of the patches of rows and of columns, each (B, C, L).

    Columns are followed one position beyond both ends of the image, rows are not: otherwise a
    corner, which is on both, would be taken off twice or not at all.
    """
    if rows[0].shape != columns[0].shape:
        row_moments = _line_moments(_line_patches(rows, 1), count)
        return [row_moments, _line_moments(_line_patches(columns, 2), count)]
    patches = _line_patches([*rows, *columns], 2)
    patches[: len(rows), ..., :: patches.shape[-1] - 1].zero_()
    return _line_moments(patches, count).split(2)


def _line_patches(lines: list[Tensor], padding: int) -> Tensor:
    """Return the patches of three entries, (E·K, 3, C, B, L + 2·padding − 2)."""
    padded = F.pad(torch.stack(lines), (padding, padding))
    patches = padded.unfold(3, padded.shape[3] - 2, 1)
    return patches.permute(0, 3, 2, 1, 4).contiguous()


def _line_moments(patches: Tensor, count: int) -> Tensor:
    lines = patches.flatten(3).flatten(1, 2)
    moments = torch.bmm(lines, lines.mT)
    return moments.view(-1, count, *patches.shape[1:3], *patches.shape[1:3])


@contextlib.contextmanager
def _in_precision_of_products(x: Tensor) -> Iterator[None]:
    """Form convolutions as precisely as products: by default torch rounds them alone to TF32."""
    backends: Any = torch.backends
    if not x.is_cuda or backends.cuda.matmul.fp32_precision == "tf32":
        yield
        return
    precision = backends.cudnn.conv.fp32_precision
    backends.cudnn.conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        backends.cudnn.conv.fp32_precision = precision
