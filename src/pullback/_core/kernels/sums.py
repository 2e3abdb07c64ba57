"""Sums of products, row by row and column by column."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ENTRIES = 2048  # that one program adds up at a time
_CHUNK = 8  # places that one program adds up


def row_sums(x: Tensor, delta: Tensor) -> Tensor:
    """Σδx and Σδ over the lines of (R, P), as (2, R)."""
    count, width = x.shape
    block = min(_ENTRIES // 2, triton.next_power_of_2(width))
    rows = max(1, _ENTRIES // block)
    out = torch.empty(2, count, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _rows[(triton.cdiv(count, rows),)](
            x, delta, out, count, width, ROWS=rows, BLOCK=block, num_warps=4
        )
    return out


def column_sums(x: Tensor, delta: Tensor, *, centered: bool, eps: float | None) -> Tensor:
    """Σ_t δx̂ and Σ_t δ of (N, T, U), as (2, N, U).

    x̂ is x less its mean over U where it is `centered`, over its root mean square with `eps`.
    """
    n, places, width = x.shape
    parts = triton.cdiv(places, _CHUNK)
    out = torch.empty(2, n, parts, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _columns[(n * parts,)](
            x, delta, out, parts, places, width, n * parts * width, 0.0 if eps is None else eps,
            CENTERED=centered, SCALED=eps is not None, CHUNK=_CHUNK, BLOCK=block,
            num_warps=max(4, block // 512),
        )  # fmt: skip
    return out.sum(2)


def tried(device: torch.device) -> None:
    """Compile and launch all."""
    some = torch.zeros(1, 1, 1, device=device)
    row_sums(some[0], some[0])
    column_sums(some, some, centered=True, eps=1.0)


@triton.jit
def _rows(x, delta, out, count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gain = tl.zeros((ROWS, BLOCK), tl.float32)
    shift = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside = (r[:, None] < count) & (c[None, :] < width)
        at = r[:, None].to(tl.int64) * width + c[None, :]
        d = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        gain += d * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        shift += d
    tl.store(out + r, tl.sum(gain, 1), mask=r < count)
    tl.store(out + count + r, tl.sum(shift, 1), mask=r < count)


@triton.jit
def _columns(
    x, delta, out, parts, places, width, apart, eps,
    CENTERED: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    c = tl.arange(0, BLOCK)
    gain = tl.zeros((BLOCK,), tl.float32)
    shift = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, CHUNK):
        t = part * CHUNK + i
        at = (n * places + t) * width + c
        inside = (c < width) & (t < places)
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        if CENTERED:
            a = tl.where(inside, a - tl.sum(a, 0) / width, 0.0)
        if SCALED:
            a = a / tl.sqrt(tl.sum(a * a, 0) / width + eps)
        gain += d * a
        shift += d
    at = (n * parts + part) * width + c
    tl.store(out + at, gain, mask=c < width)
    tl.store(out + apart + at, shift, mask=c < width)
