r"""Moments of the patches of a 3×3 convolution that keeps the image's size, from one correlation.

The image is zero outside of itself, so a product of two of a patch's entries depends on where they
stand to each other, but for the places whose patch leaves the image. With the correlation R, u and
v the offsets (0, 1 or 2 on each axis) and places s of the image,

    R[d] = Σ_s x[s] x[s + d]ᵀ,        M[u, v] = R[v − u] − Σ_{s not seen at u} x[s] x[s + v − u]ᵀ.

At u = 0 the last line of an axis is not seen, at u = 2 the first one, and x[s + v − u] lies within
the image only where v = u on that axis: so the correction is the moment of that line's own patches.
R is the weight gradient of a 5×5 convolution whose cotangent is its input, which takes 25 products
of C×C blocks instead of 81, and copies no patch. (On a CPU that is no faster than sliding, and
adds up in a row, with larger errors.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
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
    large = x.ndim == 4 and len(x) > 0 and min(x.shape[2:]) >= _LEAST
    return kept and module.padding_mode == "zeros" and module.groups == 1 and exact and large


def correlated_moment(x: Tensor) -> Tensor:
    """Σ a aᵀ (9C, 9C) over samples and places, channel-major, for x (B, C, H, W)."""
    c = x.shape[1]
    r = _correlation(x).permute(2, 3, 0, 1).reshape(25, c, c)
    m = r.index_select(0, _apart(x.device)).view(3, 3, 3, 3, c, c)  # u, v, C, C
    rows, columns = (x[:, :, -1], x[:, :, 0]), (x[..., -1], x[..., 0])
    for axis, moments in enumerate(_edges(rows, columns)):
        along = m.diagonal(0, axis, axis + 2)[..., ::2]  # u = v ∈ {0, 2} on this axis
        along -= moments.permute(1, 3, 2, 4, 0)
    return m.permute(4, 0, 1, 5, 2, 3).reshape(9 * c, 9 * c)


@lru_cache
def _apart(device: torch.device) -> Tensor:
    """Where R has v − u, for all pairs of offsets: (81,)."""
    u = range(3)
    at = [5 * (vy - uy + 2) + vx - ux + 2 for uy in u for ux in u for vy in u for vx in u]
    return torch.tensor(at, device=device)


def _correlation(x: Tensor) -> Tensor:
    """R (C, C, 5, 5), at d + 2."""
    c = x.shape[1]
    weight = x.new_empty(1).expand(c, c, 5, 5)
    with _as_products(x):
        _, found, _ = torch.ops.aten.convolution_backward(
            x, x, weight, None, [1, 1], [2, 2], [1, 1], False, [0, 0], 1, [False, True, False]
        )
    return found


def _edges(rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> Sequence[Tensor]:
    """Moments (2, 3, C, 3, C) of the patches of two rows, and of two columns, each (B, C, L).

    Columns are followed one place beyond both ends of the image, rows are not: otherwise a corner,
    which is on both, would be taken off twice or not at all.
    """
    if rows[0].shape != columns[0].shape:
        return [_moments(_line_patches(rows, 1)), _moments(_line_patches(columns, 2))]
    seen = _line_patches((*rows, *columns), 2)
    seen[:2, ..., :: seen.shape[-1] - 1] = 0
    return _moments(seen).split(2)


def _line_patches(lines: tuple[Tensor, ...], pad: int) -> Tensor:
    """(E, 3, C, B, L + 2·pad − 2)."""
    x = F.pad(torch.stack(lines), (pad, pad))
    return x.unfold(3, x.shape[3] - 2, 1).permute(0, 3, 2, 1, 4).contiguous()


def _moments(seen: Tensor) -> Tensor:
    lines = seen.flatten(3).flatten(1, 2)
    return torch.bmm(lines, lines.mT).view(*seen.shape[:3], *seen.shape[1:3])


@contextlib.contextmanager
def _as_products(x: Tensor) -> Iterator[None]:
    """Convolutions as precise as products: by default torch rounds to TF32 in the former alone."""
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
