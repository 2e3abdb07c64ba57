"""What the places of a convolution see: patches, and their moments without forming them all.

The patch at place t is a = (x[c, t + u])₍c,u₎, with u the kernel's offsets in the padded image x.
With stride 1 and places t = 0 … h-1, its second moment has a C×C block for each pair of offsets,

    M[u, v] = Σₜ x[t + u] x[t + v]ᵀ.

When both offsets move by one, so does the window of places: a product enters at its far end and one
leaves at its near end,

    M[u+1, v+1] = M[u, v] + x[u + h] x[v + h]ᵀ - x[u] x[v]ᵀ.

So the first row and column of blocks and the edges of the image give all others. On two axes this
holds along each: of the 81 blocks of a 3×3 kernel 13 are multiplied, those where min(u, v) = 0 on
both axes, up to symmetry; and an edge of an image is itself an image of one axis, whose k-1 lines
are channels, and whose samples have weight -1 where they leave. Other axes are *folded* (im2col):
their offsets become channels, and their places samples. These are strided axes, the third axis of
a `Conv3d`, and those of images that are mostly edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._core.products import products
from ..._core.space import compute_dtype
from .correlated import by_lines, line_moment

_GAIN = 1.5  # saved multiplications that pay for smaller products, one by one
_CACHE, _MEMORY = 2**24, 2**28  # bytes unfolded at a time, on the CPU and elsewhere


def patches(module: Any, x: Tensor) -> Tensor:
    """The inputs (B, G, places, C/G·kernel) that each output place sees, channel-major."""
    return windows(module, _padded(module, x))


def windows(module: Any, x: Tensor) -> Tensor:
    """The same of an input that is already padded."""
    for axis in (axes := _axes(module, x.shape[2:])):
        x = axis.unfold(x)
    # (B, C, *places, *kernel) -> (B, G, *places, C/G, *kernel)
    x = x.unflatten(1, (module.groups, -1)).movedim(2, 2 + len(axes))
    return x.flatten(2 + len(axes)).flatten(2, 1 + len(axes))


def patch_moment(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Σ a aᵀ (G, I, I) and Σ a (G, I) over samples and places, for x (B, C, *space).

    a is the patch, I = C/G·kernel channel-major as in `weight.flatten(1)`. Half precision is
    accumulated in float32, and the result stays there. Without a bias Σ a may be left out, (1, 1).
    """
    x, dtype, groups = x.detach(), compute_dtype(x.dtype), module.groups
    if by_lines(x, groups):
        return line_moment(module, x)
    alone = _padded(module, x.sum(0, keepdim=True, dtype=dtype))
    first = windows(module, alone).sum(2)[0]  # a is linear in x
    axes = _axes(module, alone.shape[2:])
    free = [a for a in axes if a.k > 1 and a.s == 1][:2]
    # elsewhere than on the CPU one large product beats many small ones
    slide = free if x.device.type == "cpu" and _pays(free, x.shape[1], groups) else []
    if x.device.type == "cpu":
        x = x.to(dtype)  # half products are slow there
    second = first.new_zeros(*first.shape, first.shape[-1])
    copied = prod(a.size if a in slide else a.k * a.places for a in axes)
    copied *= x.shape[1] * (slide[-1].k if slide else 1) * x.element_size()
    # Sums over few samples would move the moments more often than the inputs.
    limit = max(_CACHE if x.device.type == "cpu" else _MEMORY, 4 * second.nbytes)
    for some in x.chunk(max(1, -(-len(x) * copied // limit))):
        second += _folded(_padded(module, some), groups, axes, slide)
    return second, first


@dataclass(frozen=True)
class _Axis:
    """Axis `index` of x: its padded size, and the convolution's k, stride and dilation on it."""

    index: int
    size: int
    k: int
    s: int
    d: int

    @property
    def places(self) -> int:
        return (self.size - self.d * (self.k - 1) - 1) // self.s + 1

    def unfold(self, x: Tensor) -> Tensor:
        """The places stay on the axis, the k offsets come last."""
        return x.unfold(self.index, self.d * (self.k - 1) + 1, self.s)[..., :: self.d]


def _axes(module: Any, space: Sequence[int]) -> list[_Axis]:
    sizes = zip(space, module.kernel_size, module.stride, module.dilation, strict=True)
    return [_Axis(i, *these) for i, these in enumerate(sizes, start=2)]


def _padded(module: Any, x: Tensor) -> Tensor:
    pad, mode = module._reversed_padding_repeated_twice, module.padding_mode
    return F.pad(x, pad, "constant" if mode == "zeros" else mode) if any(pad) else x


def _pays(slide: Sequence[_Axis], channels: int, groups: int) -> bool:
    """Whether sliding saves enough products of C×C blocks; single numbers are not worth it."""
    if not slide or channels == groups > 1:
        return False
    first = prod(a.k * a.places + 2 * a.d * (a.k - 1) ** 2 for a in slide)  # with the edges
    opposite = prod((a.k - 1) * a.places for a in slide) if len(slide) > 1 else 0
    folded = prod(a.k**2 * a.places for a in slide) * (1 if groups > 1 else 5 / 8)  # half a Gram
    return _GAIN * (first + opposite) < folded


def _folded(x: Tensor, groups: int, axes: Sequence[_Axis], slide: Sequence[_Axis]) -> Tensor:
    """(G, I, I) of padded samples x (B, C, *space): all axes but those of `slide` are folded."""
    fold = [a for a in axes if a not in slide]
    for a in fold:
        x = a.unfold(x)
    x = x.unflatten(1, (groups, -1))  # (B, G, C, *space, *offsets)
    n, c, offsets = x.shape[0], x.shape[2], range(3 + len(axes), x.ndim)
    x = x.permute(1, 2, *offsets, 0, *(1 + a.index for a in [*fold, *slide]))
    none = 2 - len(slide)
    sizes = [n * prod(a.places for a in fold), *[1] * none, *(a.size for a in slide)]
    x = x.reshape(groups, c * prod(a.k for a in fold), *sizes)
    held = [*(a.k for a in slide), c, *(a.k for a in fold)]
    second = _moment(x, [(1, 1)] * none + [(a.k, a.d) for a in slide])
    second = second.reshape(groups, *held, *held)
    where = [len(slide), *([*slide, None, *fold].index(a) for a in axes)]  # twice (C, *kernel)
    second = second.permute(0, *(1 + i for i in where), *(1 + len(held) + i for i in where))
    return second.flatten(1 + len(held)).flatten(1, len(held))


def _moment(x: Tensor, steps: Sequence[tuple[int, int]]) -> Tensor:
    """M (G, kh, kw, C, kh, kw, C) of images x (G, C, N, H, W); `steps` are (k, d) on both axes."""
    (kh, dh), (kw, dw) = steps
    groups, c, _, height, width = x.shape
    h, w = height - dh * (kh - 1), width - dw * (kw - 1)
    # Lines come before samples, so that to move them is a view.
    z = x.unfold(4, w, dw).permute(0, 4, 1, 3, 2, 5).flatten(4)  # (G, kw, C, H, N·w)
    sides = [t[:, 0] for t in _edges(x.permute(0, 1, 4, 3, 2)[:, None], w, dw)]

    def lines(t: Tensor, e: int) -> Tensor:
        return t[:, :, :, e * dh : e * dh + h].flatten(3)

    out = z.new_empty(groups, kh, kw, c, kh, kw, c, dtype=compute_dtype(x.dtype))
    near, near_side = lines(z, 0), lines(sides[0], 0)
    out[:, 0, :, :, 0] = _row(near, near, near_side, lines(sides[1], 0))
    for e in range(1, kh):
        block = _row(near, lines(z, e), near_side, lines(sides[1], e))
        out[:, 0, :, :, e], out[:, e, :, :, 0] = block, block.permute(0, 3, 4, 1, 2)
    if kh > 1:
        # The k-1 lines of an edge are channels: (G, k, (kh-1)·C, places).
        plain, signed = (t.flatten(2, 3).flatten(3) for t in _edges(z[..., None, :], h, dh))
        ends = [_edges(t[..., None, :], h, dh)[i] for i, t in enumerate(sides)]
        change = _row(signed[:, :1], plain, *(t.flatten(2, 3).flatten(3) for t in ends))
        shape = (groups, kw, kh - 1, c, kw, kh - 1, c)
        _slide(out, change.view(shape).permute(0, 2, 1, 3, 5, 4, 6), 3)
    return out


def _row(near: Tensor, far: Tensor, side: Tensor, signed: Tensor) -> Tensor:
    """Σₜ near[t + u] far[t + v]ᵀ (G, k, C, k, C), from offsets side by side: (G, k, C, places).

    Where `near` has the offset 0 alone or is `far`, the sum is symmetric. Both sides of the image
    are (G, k-1, C, places), `signed` with weight -1 for what leaves.
    """
    groups, k, c, _ = far.shape
    out = far.new_empty(groups, k, c, k, c, dtype=compute_dtype(far.dtype))
    start, symmetric = near[:, 0], near is far or near.shape[1] == 1
    # The tall factor comes first, which is faster; one offset alone makes a Gram.
    first = products(start if near is far and k == 1 else far.flatten(1, 2), start)
    out[:, 0] = first.mT.unflatten(2, (k, c))
    if k > 1:
        column = first[:, c:] if symmetric else products(near.flatten(1, 2)[:, c:], far[:, 0])
        out[:, 1:, :, 0] = column.unflatten(1, (k - 1, c))
        change = products(side.flatten(1, 2), signed.flatten(1, 2))
        _slide(out, change.view(groups, k - 1, c, k - 1, c), 2)
    return out


def _edges(x: Tensor, window: int, d: int) -> tuple[Tensor, Tensor]:
    """What enters and leaves a window that moves along L by d, for x (G, k, C, L, A, B).

    (G, k, steps, C, A, 2d·B), plain and with weight -1 for what leaves.
    """
    rest = x.shape[3] - window
    ends = (t.unflatten(3, (rest // d, d)) for t in (x[:, :, :, window:], x[:, :, :, :rest]))
    plain = torch.cat([t.permute(0, 1, 3, 2, 5, 4, 6) for t in ends], 5)
    signed = plain.clone()
    signed[..., d:, :].neg_()
    return plain.flatten(5), signed.flatten(5)


def _slide(block: Tensor, change: Tensor, half: int) -> None:
    """M[u+1, v+1] = M[u, v] + change[u, v] in place, for u on axis 1 and v `half` axes on."""
    for u in range(steps := change.shape[1]):
        moved = block[:, u].narrow(half, 0, steps) + change[:, u]
        block[:, u + 1].narrow(half, 1, steps).copy_(moved)
