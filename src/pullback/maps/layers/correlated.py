"""Moments of 3×3 patches from one correlation, as many as there are layers of one shape.

The image is zero outside of itself, so a product of two of a patch's entries depends on where they
stand to each other, but for the places whose patch leaves the image. With the correlation R, u and
v the offsets (0, 1 or 2 on each axis) and places s of the image,

    R[d] = Σ_s x[s] x[s + d]ᵀ,        M[u, v] = R[v − u] − Σ_{s not seen at u} x[s] x[s + v − u]ᵀ.

At u = 0 the last line of an axis is not seen, at u = 2 the first one, and x[s + v − u] lies within
the image only where v = u on that axis: so the correction is the moment of that line's own patches.
R[−d] = R[d]ᵀ, and the lower half of R is the weight gradient of a 3×5 convolution whose cotangent
is its input, which takes 15 products of C×C blocks instead of 81, and copies no patch. What follows
is small, and done for all inputs of one shape at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST = 4  # lines of an image, below which it is mostly edge


def correlates(module: Any, x: Tensor) -> bool:
    """Whether this is the way to go, for x (B, C, H, W)."""
    kept = module.kernel_size == (3, 3) and module.stride == module.dilation == (1, 1)
    kept = kept and list(module._reversed_padding_repeated_twice) == [1, 1, 1, 1]
    exact = x.dtype in (torch.float32, torch.float64)  # else the weight gradient is rounded
    large = x.ndim == 4 and x.shape[0] > 0 and min(x.shape[2:]) >= _LEAST
    return kept and module.padding_mode == "zeros" and module.groups == 1 and exact and large


def correlated_moments(some: Sequence[Tensor]) -> Tensor:
    """Σ a aᵀ (K, 9C, 9C) over samples and places, channel-major, for K inputs (B, C, H, W)."""
    k = len(some)
    c = some[0].shape[1]
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
    sizes = (k * c, c, 3, 3)
    steps = (25 * c, 25, 5, 1)
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


@contextlib.contextmanager
def _as_products(x: Tensor) -> Iterator[None]:
    """Convolutions as precise as products: by default torch rounds them alone to TF32."""
    backends: Any = torch.backends
    if not x.is_cuda or backends.cuda.matmul.fp32_precision == "tf32":
        yield
        return
    before = backends.cudnn.conv.fp32_precision
    backends.cudnn.conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        backends.cudnn.conv.fp32_precision = before
