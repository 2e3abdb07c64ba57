"""Symmetric products X Xᵀ, float32 products at float32 accuracy, sums at repeated indices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SPLIT_ABOVE = 2**36  # flops from which split TF32 products beat one float32 product
_DEPTH = 1024  # longest sum left to a tensor core, whose accumulator truncates
_PANELS = 6
_WIDE = 16
_TILE = 256
_SPLITTING = threading.local()  # depth: the contexts of this thread that split products
_HALVED = 2048  # columns from which on a product in half precision is formed by halves


def gram(x: Tensor) -> Tensor:
    """X Xᵀ for (n, d): only the panels on and below the diagonal are multiplied."""
    n = x.shape[0]
    small = n * n * x.shape[1] < (2**34 if x.is_cuda else 2**22)  # panels would not pay
    split = not small and _splits(x, x.T)
    if split:
        out = x.new_zeros(n, n)
        add_cross_gram(out, x, x)
        return mirror_lower_triangle(out)
    if small or len(panel_bounds(n, x)) == 1:
        return torch.mm(x, x.T)
    out = x.new_empty(n, n)
    for a, b in panel_bounds(n, x):  # rows of panels, each turned over while it is in the cache
        # X Yᵀ is written as its transpose, by the same call of BLAS. Rows are not left to it by
        # torch on ARM: its kernels there copy slices first, and err by 2e-5 where 1e5 float32
        # numbers are added up, a hundred times as much.
        torch.mm(x[:b], x[a:b].T, out=out[a:b, :b].T)
        out[:a, a:b] = out[a:b, :a].T
    return out


def panel_bounds(n: int, like: Tensor) -> list[tuple[int, int]]:
    """Bounds of the columns a symmetric matrix is multiplied by, one panel where n is small.

    They are whole vector registers apart, without which the products are slower by a tenth.
    """
    count = max(1, min(_PANELS, n // (1024 if like.is_cuda else 48)))
    inner = [_WIDE * round(n * i / (count * _WIDE)) for i in range(1, count)]
    return list(pairwise([0, *inner, n]))


def mirror_lower_triangle(out: Tensor) -> Tensor:
    """What stands above the diagonal from what stands below it, in place."""
    n = out.shape[0]
    step = _TILE if out.device.type == "cpu" else 16 * _TILE  # turned over within the cache
    for a in range(0, n, step):
        b = min(a + step, n)
        for c in range(b, n, step):
            out[a:b, c : c + step] = out[c : c + step, a:b].T
        corner = out[a:b, a:b].tril_()
        corner += corner.tril(-1).T
    return out


def add_cross_gram(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Add X Yᵀ to out; where y is x, at least on and below the diagonal.

    `mirror_lower_triangle` then fills the rest.
    """
    split = _splits(x, y.T)
    one = _parts(x) if split else ()
    two = one if y is x or not split else _parts(y)
    for a, b in panel_bounds(len(x), x) if y is x else [(0, len(y))]:
        start = a if y is x else 0
        if split:
            _accumulate(out[start:, a:b], [p[start:] for p in one], [p[a:b].T for p in two])
        else:
            out[start:, a:b].T.addmm_(y[a:b], x[start:].T)  # as in `gram`


def column_gram(x: Tensor) -> Tensor:
    """XᵀX for (P, n), accumulated in float32 where x has half precision."""
    if x.dtype in (torch.float16, torch.bfloat16):
        if x.is_cuda:
            return write_half_precision_moment(
                x.new_empty(x.shape[1], x.shape[1], dtype=torch.float32), x
            )
        x = x.float()
    return gram(x.T)


def write_half_precision_moment(out: Tensor, x: Tensor) -> Tensor:
    """XᵀX of (P, n) in half precision on a GPU, written there in float32.

    Of a large one the halves' own products and the one between them: three quarters of it.
    """
    n, h = x.shape[1], x.shape[1] // 2
    if n < _HALVED or n % 16:
        return torch.mm(x.T, x, out_dtype=torch.float32, out=out)
    both, corner = x.unflatten(1, (2, h)).transpose(0, 1), out[:h, h:]
    own = out.as_strided((2, h, h), (h * (out.stride(0) + 1), *out.stride()))
    torch.bmm(both.mT, both, out_dtype=torch.float32, out=own)
    torch.mm(x[:, :h].T, x[:, h:], out_dtype=torch.float32, out=corner)
    out[h:, :h] = corner.T
    return out


def multiply_batches(x: Tensor, y: Tensor) -> Tensor:
    """X Yᵀ for (G, n, d) and (G, m, d), accumulated in float32 where they have half precision."""
    if x.dtype in (torch.float16, torch.bfloat16):
        if x.is_cuda:
            if x.shape[0] == 1:
                return torch.mm(x[0], y[0].T, out_dtype=torch.float32)[None]
            return torch.bmm(x, y.mT, out_dtype=torch.float32)
        x, y = x.float(), x.float() if y is x else y.float()
    groups, n, _ = x.shape
    if groups == 1 and (x.device.type != "cpu" or (y is x and len(panel_bounds(n, x)) > 1)):
        return cross_gram(one := x[0], one if y is x else y[0])[None]
    if groups > 1 and (x.device.type != "cpu" or torch.backends.mkl.is_available()):
        return torch.bmm(x, y.mT)
    out = x.new_empty(groups, n, y.shape[1])
    torch.bmm(y, x.mT, out=out.mT)  # as in `gram`
    return out


def cross_gram(x: Tensor, y: Tensor) -> Tensor:
    """X Yᵀ, using the symmetry where y is x."""
    if y is x:
        return gram(x)
    return split_mm(x, y.T) if _splits(x, y.T) else x @ y.T


@contextlib.contextmanager
def full_precision(
    device: torch.device, entries: float = float("inf"), *, watched: bool = True
) -> Iterator[None]:
    """Float32 products and convolutions at float32 accuracy, on tensor cores where that pays.

    Plain TF32 keeps 10 bits of each factor, and a natural gradient divides by small eigenvalues:
    the step would be off by percents. So TF32 is switched off, and large products are split: both
    factors into two parts, three products of them (high·high + high·low + low·high) added, in sums
    short enough for the cores' truncating accumulators. `entries` is the size of A: where it is
    small no product is large, and the products are not watched. Watching costs the host, for every
    operation, as much time as its launch: without, only this module's own products are split.
    """
    if device.type != "cuda":
        yield
        return
    backends: Any = torch.backends
    before = backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision
    backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = "ieee"
    split = entries >= SPLIT_ABOVE / 8
    _SPLITTING.depth = depth = getattr(_SPLITTING, "depth", 0) + split
    try:
        with _Split() if split and watched else contextlib.nullcontext():
            yield
    finally:
        _SPLITTING.depth = depth - split
        backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision = before


class _Split(TorchDispatchMode):
    """Replaces `mm` and `addmm`; reverse passes are seen too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and _large(args[0], args[1]):
            return split_mm(args[0], args[1])
        if func is torch.ops.aten.addmm.default and not kwargs and _large(args[1], args[2]):
            return split_mm(args[1], args[2]).add_(args[0])
        return func(*args, **(kwargs or {}))


def _splits(x: Tensor, y: Tensor) -> bool:
    """Whether this module's own product X Y is split, inside `full_precision`."""
    return getattr(_SPLITTING, "depth", 0) > 0 and _large(x, y)


def _large(x: Tensor, y: Tensor) -> bool:
    flops = 2 * x.shape[0] * x.shape[1] * y.shape[1]
    return x.is_cuda and x.dtype == torch.float32 and flops >= SPLIT_ABOVE


def split_mm(x: Tensor, y: Tensor) -> Tensor:
    """X Y from TF32 products of the split factors."""
    out = x.new_zeros(x.shape[0], y.shape[1])
    _accumulate(out, _parts(x), _parts(y))
    return out


def _accumulate(out: Tensor, x: Sequence[Tensor], y: Sequence[Tensor]) -> None:
    """out += X Y, from the parts of both."""
    (xh, x_high, x_low), (yh, y_high, y_low) = x, y
    out += torch.mm(x_high, y_low, out_dtype=torch.float32)
    out += torch.mm(x_low, y_high, out_dtype=torch.float32)
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        _accumulate_short_sums(out, xh, yh)
    finally:
        matmul.fp32_precision = before


def _accumulate_short_sums(out: Tensor, x: Tensor, y: Tensor) -> None:
    """out += X Y in sums of at most _DEPTH terms, many of them at once where X is long."""
    depth = x.shape[1]
    whole = depth // _DEPTH if depth > 8 * _DEPTH else 0
    batch = max(1, 2**26 // out.numel())
    for a in range(0, whole, batch):
        b = min(a + batch, whole)
        one = x[:, a * _DEPTH : b * _DEPTH].unflatten(1, (b - a, _DEPTH)).transpose(0, 1)
        two = y[a * _DEPTH : b * _DEPTH].unflatten(0, (b - a, _DEPTH))
        out += torch.bmm(one, two).sum(0)
    for k in range(whole * _DEPTH, depth, _DEPTH):
        out.addmm_(x[:, k : k + _DEPTH], y[k : k + _DEPTH])


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`high`, and both halves in bfloat16, for the mixed products, which are 2⁻¹¹ as large."""
    high, low = _halves(x)
    return high, high.to(torch.bfloat16), low.to(torch.bfloat16)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = high + low, `high` exact in TF32: rounded to 10 mantissa bits."""
    if not x.is_contiguous() and not x.mT.is_contiguous():
        x = x.contiguous()
    high = (x.view(torch.int32) + 4096).bitwise_and_(-8192).view(torch.float32)
    return high, x - high


def add_at(out: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """out[index] += values along axis 0, in place.

    On a GPU `index_add_` and `scatter_add_` add in a random order; `index_put_` sorts first, and
    is the faster one. On the CPU it is the other way round.
    """
    if out.is_cuda:
        return out.index_put_((index,), values, accumulate=True)
    return out.index_add_(0, index, values)
