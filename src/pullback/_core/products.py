"""Symmetric products X Xᵀ, float32 products at float32 accuracy, sums at repeated indices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HALF_PRECISIONS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ProductSizes:
    """The sizes at which a product is formed in another way, measured on the devices named."""

    #: flops of one product from which on split TF32 products beat one float32 product (H200)
    split_above: int = 2**36
    #: longest sum that is left to a tensor core, whose accumulator truncates: 1,024 truncations
    #: of 2⁻²⁴ all have one sign and add up to 2⁻¹⁴ at worst
    longest_sum: int = 1024
    #: sums beyond this many times `longest_sum` are formed in batches: eight launches are few
    batched_sums: int = 8
    #: entries that such a batch of partial products may have: 256 MiB in float32
    batch_entries: int = 2**26
    #: multiply-adds below which X Xᵀ is one product, on a CPU and on a GPU. On one thread with
    #: AVX-512 panels take 1.1 to 1.4 times as long at 2²⁴ to 2²⁷, and 0.8 times at 2³¹.
    one_panel_cpu: int = 2**29
    one_panel_gpu: int = 2**34
    #: panels of X Xᵀ at most: n of them leave (1 + 1/n)/2 of the work, six 58 %, twelve 54 %
    most_panels: int = 6
    #: rows of a panel at least, on a CPU and on a GPU: with 80 to 170 rows two panels were faster
    #: than six on a CPU
    panel_rows_cpu: int = 256
    panel_rows_gpu: int = 1024
    #: float32 numbers of a vector register of AVX-512; bounds of panels are multiples of it
    register_width: int = 16
    #: rows and columns of a tile that is transposed within the cache, on a CPU and on a GPU: 256
    #: KiB and 64 MiB in float32, a second-level cache of each
    tile_cpu: int = 256
    tile_gpu: int = 4096
    #: columns from which on XᵀX in half precision is formed by halves (three quarters of the work)
    halved_columns: int = 2048


_SIZES = ProductSizes()
#: flops from which on split TF32 products beat one float32 product
SPLIT_ABOVE = _SIZES.split_above
#: `depth`: the number of contexts of this thread in which products are split
_SPLITTING = threading.local()


def gram(x: Tensor) -> Tensor:
    """Return X Xᵀ for (n, d); only the panels on and below the diagonal are multiplied."""
    n = x.shape[0]
    one_panel = _SIZES.one_panel_gpu if x.is_cuda else _SIZES.one_panel_cpu
    if n * n * x.shape[1] < one_panel:
        return torch.mm(x, x.T)
    if _is_split(x, x.T):
        product = x.new_zeros(n, n)
        add_cross_gram(product, x, x)
        return mirror_lower_triangle(product)
    bounds = panel_bounds(n, x)
    if len(bounds) == 1:
        return torch.mm(x, x.T)
    product = x.new_empty(n, n)
    for start, stop in bounds:  # rows of panels, each transposed while it is in the cache
        # X Yᵀ is written as its transpose, by the same call of BLAS. Torch on ARM forms rows by
        # kernels of its own, which copy slices first and err by 2e-5 where 1e5 float32 numbers
        # are added up, a hundred times as much.
        torch.mm(x[:stop], x[start:stop].T, out=product[start:stop, :stop].T)
        product[:start, start:stop] = product[start:stop, :start].T
    return product


def panel_bounds(n: int, x: Tensor) -> list[tuple[int, int]]:
    """Return the bounds of the columns by which a symmetric (n, n) product of x is formed.

    There is one panel where n is small. Bounds are multiples of a vector register, without which
    the products are slower by a tenth.
    """
    rows = _SIZES.panel_rows_gpu if x.is_cuda else _SIZES.panel_rows_cpu
    count = max(1, min(_SIZES.most_panels, n // rows))
    width = _SIZES.register_width
    inner = [width * round(n * i / (count * width)) for i in range(1, count)]
    return list(pairwise([0, *inner, n]))


def mirror_lower_triangle(matrix: Tensor) -> Tensor:
    """Fill the entries above the diagonal from those below it, in place."""
    n = matrix.shape[0]
    tile = _SIZES.tile_cpu if matrix.device.type == "cpu" else _SIZES.tile_gpu
    for start in range(0, n, tile):
        stop = min(start + tile, n)
        for other in range(stop, n, tile):
            below = matrix[other : other + tile, start:stop]
            matrix[start:stop, other : other + tile] = below.T
        corner = matrix[start:stop, start:stop].tril_()
        corner += corner.tril(-1).T
    return matrix


def add_cross_gram(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Add X Yᵀ to `out`; where y is x, at least on and below the diagonal.

    `mirror_lower_triangle` then fills the rest.
    """
    is_symmetric = y is x
    bounds = panel_bounds(len(x), x) if is_symmetric else [(0, len(y))]
    if not _is_split(x, y.T):
        for start, stop in bounds:
            first = start if is_symmetric else 0
            out[first:, start:stop].T.addmm_(y[start:stop], x[first:].T)  # as in `gram`
        return
    split_x = SplitFactor.of(x)
    split_y = split_x if is_symmetric else SplitFactor.of(y)
    for start, stop in bounds:
        first = start if is_symmetric else 0
        _add_split_product(
            out[first:, start:stop], split_x[first:], split_y[start:stop].transpose()
        )


def is_centered_gram_fast(rows: int, device: torch.device) -> bool:
    """Return True if `add_centered_gram` is faster than a float64 product for so many rows."""
    return device.type == "cuda" and 2 * rows**2 * _SIZES.longest_sum >= SPLIT_ABOVE


def add_centered_gram(out: Tensor, x: Tensor, covectors: int) -> None:
    """Add C Cᵀ to `out` in float64, C the float32 rows X less their mean over the samples.

    Rows are ordered (sample, covector), and each covector has a mean of its own. At least entries
    on and below the diagonal are added. On a GPU a large product is formed by tensor cores at
    float32 accuracy. Its errors are independent between calls, and calls are added up in float64.
    """
    by_sample = x.unflatten(0, (-1, covectors))
    centered = (by_sample - by_sample.mean(0)).flatten(0, 1)
    if not _is_large_product(centered, centered.T):
        converted = centered.to(out.dtype)
        add_cross_gram(out, converted, converted)
        return
    split = SplitFactor.of(centered)
    for start, stop in panel_bounds(len(x), x):
        product = x.new_zeros(len(x) - start, stop - start)
        _add_split_product(product, split[start:], split[start:stop].transpose())
        out[start:, start:stop] += product


def column_gram(x: Tensor) -> Tensor:
    """Return XᵀX for (P, n), accumulated in float32 where x has half precision."""
    if x.dtype in HALF_PRECISIONS:
        if x.is_cuda:
            out = x.new_empty(x.shape[1], x.shape[1], dtype=torch.float32)
            return write_half_precision_moment(out, x)
        x = x.float()
    return gram(x.T)


def write_half_precision_moment(out: Tensor, x: Tensor) -> Tensor:
    """Write XᵀX of (P, n) in half precision on a GPU to `out`, in float32, and return it.

    Of a large one the blocks on the diagonal and one block beside it are formed, which is three
    quarters of the work.
    """
    n = x.shape[1]
    if n < _SIZES.halved_columns or n % 16:
        return torch.mm(x.T, x, out_dtype=torch.float32, out=out)
    half = n // 2
    halves = x.unflatten(1, (2, half)).transpose(0, 1)
    diagonal_stride = half * (out.stride(0) + 1)
    diagonal_blocks = out.as_strided((2, half, half), (diagonal_stride, *out.stride()))
    torch.bmm(halves.mT, halves, out_dtype=torch.float32, out=diagonal_blocks)
    corner = out[:half, half:]
    torch.mm(x[:, :half].T, x[:, half:], out_dtype=torch.float32, out=corner)
    out[half:, :half] = corner.T
    return out


def multiply_batches(x: Tensor, y: Tensor) -> Tensor:
    """Return X Yᵀ for (G, n, d), (G, m, d), accumulated in float32 where x has half precision."""
    if x.dtype in HALF_PRECISIONS:
        return _multiply_half_batches(x, y)
    is_cpu = x.device.type == "cpu"
    groups, n, _ = x.shape
    if groups > 1 and (not is_cpu or torch.backends.mkl.is_available()):
        return torch.bmm(x, y.mT)
    if groups == 1 and y is x and (not is_cpu or len(panel_bounds(n, x)) > 1):
        return gram(x[0])[None]
    if groups == 1 and not is_cpu:
        return cross_gram(x[0], y[0])[None]
    product = x.new_empty(groups, n, y.shape[1])
    torch.bmm(y, x.mT, out=product.mT)  # as in `gram`
    return product


def _multiply_half_batches(x: Tensor, y: Tensor) -> Tensor:
    """Return `multiply_batches` of half-precision factors, in float32."""
    if not x.is_cuda:
        return multiply_batches(x.float(), y.float())
    if x.shape[0] == 1:
        return torch.mm(x[0], y[0].T, out_dtype=torch.float32)[None]
    return torch.bmm(x, y.mT, out_dtype=torch.float32)


def cross_gram(x: Tensor, y: Tensor) -> Tensor:
    """Return X Yᵀ, using the symmetry where y is x."""
    if y is x:
        return gram(x)
    if _is_split(x, y.T):
        return split_mm(x, y.T)
    return x @ y.T


def full_precision(
    device: torch.device, entries: float = float("inf"), *, watched: bool = True
) -> contextlib.AbstractContextManager[None]:
    """Form float32 products and convolutions at float32 accuracy inside, on tensor cores if faster.

    Plain TF32 keeps 10 bits of each factor, and a natural gradient divides by small eigenvalues:
    the step would be off by percents. So TF32 is switched off, and large products are split: each
    factor is a sum high + low, and the products high·high + high·low + low·high are added, in sums
    short enough for the cores' truncating accumulators.

    Args:
        device: nothing changes unless it is a GPU.
        entries: of the largest factor inside, such as A. Where it is small no product is large.
        watched: whether products of torch are split too. This costs the host, for every operation,
            as much time as its launch; otherwise only this module's own products are split.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return _split_products(entries, watched=watched)


@contextlib.contextmanager
def _split_products(entries: float, *, watched: bool) -> Iterator[None]:
    """Switch TF32 off and split large products inside, on a GPU."""
    backends: Any = torch.backends
    conv_precision = backends.cudnn.conv.fp32_precision
    matmul_precision = backends.cuda.matmul.fp32_precision
    backends.cudnn.conv.fp32_precision = backends.cuda.matmul.fp32_precision = "ieee"
    has_large_products = entries >= SPLIT_ABOVE / 8
    depth = getattr(_SPLITTING, "depth", 0) + has_large_products
    _SPLITTING.depth = depth
    watch: Any = contextlib.nullcontext()
    if has_large_products and watched:
        watch = _SplitLargeProducts()
    try:
        with watch:
            yield
    finally:
        _SPLITTING.depth = depth - has_large_products
        backends.cudnn.conv.fp32_precision = conv_precision
        backends.cuda.matmul.fp32_precision = matmul_precision


def has_fast_float64(device: torch.device) -> bool:
    """Return True on CPUs, and on GPUs whose tensor cores multiply float64: A100, H100, B200."""
    if device.type != "cuda":
        return device.type == "cpu"
    return torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0))


class _SplitLargeProducts(TorchDispatchMode):
    """Replaces large `mm` and `addmm` by split products, in backward passes too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and _is_large_product(args[0], args[1]):
            return split_mm(args[0], args[1])
        if (
            func is torch.ops.aten.addmm.default
            and not kwargs
            and _is_large_product(args[1], args[2])
        ):
            return split_mm(args[1], args[2]).add_(args[0])
        return func(*args, **(kwargs or {}))


def _is_split(x: Tensor, y: Tensor) -> bool:
    """Return True if this module's own product X Y is split: a large one in `full_precision`."""
    return getattr(_SPLITTING, "depth", 0) > 0 and _is_large_product(x, y)


def _is_large_product(x: Tensor, y: Tensor) -> bool:
    """Return True if X Y is so large a float32 product on a GPU that splitting it pays."""
    flops = 2 * x.shape[0] * x.shape[1] * y.shape[1]
    return x.is_cuda and x.dtype == torch.float32 and flops >= SPLIT_ABOVE


@dataclass(frozen=True)
class SplitFactor:
    """X = high + low, where `high` is exact in TF32; mixed products take both in bfloat16.

    Mixed products are 2⁻¹¹ as large as the product of the high parts, so that the 8 bits of
    bfloat16 are enough for them.
    """

    high: Tensor
    high_bfloat16: Tensor
    low_bfloat16: Tensor

    @classmethod
    def of(cls, x: Tensor) -> SplitFactor:
        """Return the split of a float32 matrix."""
        high, low = _split_exactly(x)
        return cls(high, high.to(torch.bfloat16), low.to(torch.bfloat16))

    def __getitem__(self, rows: slice) -> SplitFactor:
        return SplitFactor(self.high[rows], self.high_bfloat16[rows], self.low_bfloat16[rows])

    def transpose(self) -> SplitFactor:
        """Return the split of Xᵀ."""
        return SplitFactor(self.high.T, self.high_bfloat16.T, self.low_bfloat16.T)


def _split_exactly(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x = high + low, where `high` is rounded to the 10 mantissa bits of TF32."""
    if not x.is_contiguous() and not x.mT.is_contiguous():
        x = x.contiguous()
    high = (x.view(torch.int32) + 4096).bitwise_and_(-8192).view(torch.float32)
    return high, x - high


def split_mm(x: Tensor, y: Tensor) -> Tensor:
    """Return X Y, formed by TF32 products of the split factors."""
    product = x.new_zeros(x.shape[0], y.shape[1])
    _add_split_product(product, SplitFactor.of(x), SplitFactor.of(y))
    return product


def _add_split_product(out: Tensor, x: SplitFactor, y: SplitFactor) -> None:
    """Add X Y to `out`; low·low is below float32's round-off and left out."""
    out += torch.mm(x.high_bfloat16, y.low_bfloat16, out_dtype=torch.float32)
    out += torch.mm(x.low_bfloat16, y.high_bfloat16, out_dtype=torch.float32)
    matmul: Any = torch.backends.cuda.matmul
    outer_precision = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        _add_short_sums(out, x.high, y.high)
    finally:
        matmul.fp32_precision = outer_precision


def _add_short_sums(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Add X Y to `out` in sums of at most `longest_sum` terms, several at once where X is long."""
    length = _SIZES.longest_sum
    depth = x.shape[1]
    batched_count = 0
    if depth > _SIZES.batched_sums * length:
        batched_count = depth // length
    batch = max(1, _SIZES.batch_entries // out.numel())
    for first in range(0, batched_count, batch):
        count = min(batch, batched_count - first)
        terms = slice(first * length, (first + count) * length)
        left = x[:, terms].unflatten(1, (count, length)).transpose(0, 1)
        right = y[terms].unflatten(0, (count, length))
        out += torch.bmm(left, right).sum(0)
    for start in range(batched_count * length, depth, length):
        out.addmm_(x[:, start : start + length], y[start : start + length])


def add_at(out: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Add values to out[index] along axis 0, in place, and return `out`.

    On a GPU `index_add_` and `scatter_add_` add in a random order; `index_put_` sorts first, and
    is faster. On the CPU `index_add_` is the faster one.
    """
    if out.is_cuda:
        return out.index_put_((index,), values, accumulate=True)
    return out.index_add_(0, index, values)
