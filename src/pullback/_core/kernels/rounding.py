"""Matrices to float16 with scales, and back."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _ACROSS = 8, 256  # entries of a tile, which four warps work on
_PROGRAMS, _MOST = 2048, 1024  # that share the tiles of all matrices, and of one
_EXTRA = 8  # columns for a bias; widths are multiples of it, so that as many entries are one access


def peaks(
    x: Tensor, last: Tensor | None, by: Tensor, wide: int, *, across: bool, top: float, least: float
) -> Tensor:
    """max |by·x|/top + least of each matrix in parts, (G, parts), of which the largest is meant.

    [V b] is V (G, O, wide) with `last` b (G, O), or one matrix (G, O, wide + 8) if numbers are
    given `across`, for its columns: b, and seven columns that do not count. What is NaN stays so.
    """
    sizes, parts = _sizes(x, last, wide, across), _parts(x, wide)
    out = torch.empty(len(x), parts, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _peaks[(out.numel(),)](
            x, x if last is None else last, by, out, parts, *sizes, 1 / top, least,
            CROSS=across, ROWS=_ROWS, BLOCK=_ACROSS, EXTRA=_EXTRA, num_warps=4,
        )  # fmt: skip
    return out


def shortened(
    x: Tensor, last: Tensor | None, by: Tensor, wide: int, found: Tensor, *, across: bool
) -> Tensor:
    """by·x over the largest of `found`, in float16, as one matrix; b fills all eight columns."""
    high, *widths = _sizes(x, last, wide, across)
    out = torch.empty(len(x), high, widths[1] * _EXTRA, dtype=torch.float16, device=x.device)
    with torch.cuda.device_of(x):
        _shortened[(found.numel(),)](
            x, x if last is None else last, by, found, out, found.shape[1], high, *widths,
            CROSS=across, ROWS=_ROWS, BLOCK=_ACROSS, MOST=_MOST, EXTRA=_EXTRA, num_warps=4,
        )  # fmt: skip
    return out


def scaled(
    x: Tensor,
    first: Tensor,
    second: Tensor,
    unit: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> None:
    """V and b of one matrix [V b], times `unit` (G,) and the largest of both `first` and `second`.

    Peaks in as many parts, both, as there are for this matrix.
    """
    sizes = _sizes(x, None, weight.shape[2], True)
    with torch.cuda.device_of(x):
        _scaled[(second.numel(),)](
            x, first, second, unit, weight, weight if bias is None else bias, second.shape[1],
            *sizes, ROWS=_ROWS, BLOCK=_ACROSS, MOST=_MOST, EXTRA=_EXTRA, num_warps=4,
        )  # fmt: skip


def _sizes(x: Tensor, last: Tensor | None, wide: int, across: bool) -> tuple[int, int, int]:
    """Rows, and columns without and with the bias, in eights."""
    room = x.shape[2] if across else wide + (0 if last is None else _EXTRA)
    return x.shape[1], wide // _EXTRA, room // _EXTRA


def _parts(x: Tensor, wide: int) -> int:
    """Programs for one matrix: some for each tile across it, which go down from there."""
    across = triton.cdiv(wide, _ACROSS)
    share = min(_MOST, triton.cdiv(_PROGRAMS, len(x))) // across
    return across * max(1, min(share, triton.cdiv(x.shape[1], _ROWS)))


def tried(device: torch.device) -> None:
    """Compile and launch all."""
    some = torch.zeros(1, 1, 8, device=device)
    for across in (False, True):
        m = peaks(some, None, some[0], 8, across=across, top=1.0, least=1.0)
        shortened(some, None, some[0], 8, m, across=across)
    scaled(some, m, m, some[0, 0], some)


@triton.jit
def _largest(found, g, parts, MOST: tl.constexpr):
    """As integers floats ≥ 0 have the same order, and NaN is the largest."""
    i = tl.arange(0, MOST)
    x = tl.load(found + g * parts + i, mask=i < parts, other=0.0)
    return tl.max(x.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)


# Caches hold what was touched last: `_peaks` and `_scaled` go from the end, where products and
# copies stopped, and `_shortened` from the beginning, where `_peaks` did.


@triton.jit(do_not_specialize=["parts", "high", "wide", "room"])
def _peaks(
    x, last, by, out, parts, high, wide, room, over, least,
    CROSS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    joint, wide, room = room > wide, wide * EXTRA, room * EXTRA
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    g, p = (program // parts).to(tl.int64), program % parts
    across, down = tl.cdiv(wide, BLOCK), tl.cdiv(high, ROWS)
    c = p % across * BLOCK + tl.arange(0, BLOCK)
    ahead, joint = c < wide, joint & (p % across == 0)
    if CROSS:
        f = tl.load(by + g * room + c, mask=ahead, other=0.0)[None, :]
        e = tl.load(by + g * room + wide, mask=joint, other=0.0)
    most = tl.zeros((ROWS, BLOCK), tl.int32)
    edge = tl.zeros((ROWS,), tl.int32)
    for i in range(p // across, down, parts // across):
        r = (down - 1 - i) * ROWS + tl.arange(0, ROWS)
        at, below = g * high + r, r < high
        if CROSS:
            start, end = at * room, at * room + wide
        else:
            start, end = at * wide, at
            e = tl.load(by + at, mask=below, other=0.0)
            f = e[:, None]
        inside = below[:, None] & ahead[None, :]
        v = tl.load(x + start[:, None] + c[None, :], mask=inside, other=0.0)
        b = tl.load(last + end, mask=below & joint, other=0.0)
        most = tl.maximum(most, tl.abs(v * f).to(tl.int32, bitcast=True))
        edge = tl.maximum(edge, tl.abs(b * e).to(tl.int32, bitcast=True))
    found = tl.max(tl.maximum(tl.max(most, 1), edge), 0).to(tl.float32, bitcast=True)
    tl.store(out + g * parts + p, found * over + least)


@triton.jit(do_not_specialize=["parts", "high", "wide", "room"])
def _shortened(
    x, last, by, found, out, parts, high, wide, room,
    CROSS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
    EXTRA: tl.constexpr,
):  # fmt: skip
    joint, wide, room = room > wide, wide * EXTRA, room * EXTRA
    g, p = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    across, down = tl.cdiv(wide, BLOCK), tl.cdiv(high, ROWS)
    c = p % across * BLOCK + tl.arange(0, BLOCK)
    extra = wide + tl.arange(0, EXTRA)
    ahead, joint = c < wide, joint & (p % across == 0)
    m = _largest(found, g, parts, MOST)
    if CROSS:
        f = (tl.load(by + g * room + c, mask=ahead, other=0.0) / m)[None, :]
        e = tl.load(by + g * room + wide, mask=joint, other=0.0) / m
    for i in range(p // across, down, parts // across):
        r = i * ROWS + tl.arange(0, ROWS)
        at, below = g * high + r, r < high
        if CROSS:
            start, end = at * room, at * room + wide
        else:
            start, end = at * wide, at
            e = tl.load(by + at, mask=below, other=0.0) / m
            f = e[:, None]
        inside, to = below[:, None] & ahead[None, :], (at * room)[:, None]
        v = tl.load(x + start[:, None] + c[None, :], mask=inside, other=0.0)
        b = tl.load(last + end, mask=below & joint, other=0.0)
        tl.store(out + to + c[None, :], (v * f).to(tl.float16), mask=inside)
        bias = tl.broadcast_to((b * e).to(tl.float16)[:, None], (ROWS, EXTRA))
        tl.store(out + to + extra[None, :], bias, mask=(below & joint)[:, None])


@triton.jit(do_not_specialize=["parts", "high", "wide", "room"])
def _scaled(
    x, first, second, unit, weight, bias, parts, high, wide, room,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    joint, wide, room = room > wide, wide * EXTRA, room * EXTRA
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    g, p = (program // parts).to(tl.int64), program % parts
    across, down = tl.cdiv(wide, BLOCK), tl.cdiv(high, ROWS)
    c = p % across * BLOCK + tl.arange(0, BLOCK)
    ahead, joint = c < wide, joint & (p % across == 0)
    f = _largest(second, g, parts, MOST) * tl.load(unit + g) * _largest(first, g, parts, MOST)
    for i in range(p // across, down, parts // across):
        r = (down - 1 - i) * ROWS + tl.arange(0, ROWS)
        at, below = g * high + r, r < high
        inside = below[:, None] & ahead[None, :]
        v = tl.load(x + (at * room)[:, None] + c[None, :], mask=inside, other=0.0)
        b = tl.load(x + at * room + wide, mask=below & joint, other=0.0)
        tl.store(weight + (at * wide)[:, None] + c[None, :], v * f, mask=inside)
        tl.store(bias + at, b * f, mask=below & joint)
