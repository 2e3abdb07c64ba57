"""Moments of 3×3 patches from a correlation and the moments of edges; channels turned to lines."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 32
_ENTRIES = 4096


def assembled(lower: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """M[u, v] = R[v − u] less edges, (K, 9C, 9C), from the lower half of R, (K, C, C, 3, 5).

    Edges are moments (2, K, 3, C, 3, C): those of rows are taken off where u = v is 0 or 2 down the
    image, those of columns where it is so across.
    """
    k, c = lower.shape[:2]
    out = torch.empty(k, 9 * c, 9 * c, dtype=torch.float32, device=lower.device)
    with torch.cuda.device_of(lower):
        _assembled[(k * c, triton.cdiv(c, _BLOCK))](
            lower, rows, columns, out, k, c, BLOCK=_BLOCK, num_warps=4
        )
    return out


def turned(x: Tensor, out: Tensor) -> None:
    """(N, C, P) to (C, N, P)."""
    n, c, places = x.shape
    block = min(_ENTRIES // 4, triton.next_power_of_2(places))
    rows = min(16, _ENTRIES // block)
    with torch.cuda.device_of(x):
        _turned[(triton.cdiv(c, rows), n)](
            x, out, n, c, places, ROWS=rows, BLOCK=block, num_warps=4
        )


def tried(device: torch.device) -> None:
    """Compile and launch all."""
    some = torch.zeros(2, 1, 3, 1, 3, 1, device=device)
    assembled(torch.zeros(1, 1, 1, 3, 5, device=device), some, some)
    turned(some.view(1, 2, 9), torch.empty(2, 1, 9, device=device))


@triton.jit
def _assembled(lower, rows, columns, out, k, c, BLOCK: tl.constexpr):
    own = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    one, i = own // c, own % c
    v = tl.arange(0, 16)
    vy, vx = v // 3, v % 3
    inside = (e < c)[:, None] & (v < 9)[None, :]
    ahead, back = ((own * c + e) * 15)[:, None], (((one * c + e) * c + i) * 15)[:, None]
    for u in tl.static_range(9):
        uy, ux = u // 3, u % 3
        dy, dx = vy - uy, vx - ux
        at = tl.where(dy >= 0, dy * 5 + dx + 2, 2 - dy * 5 - dx)[None, :]
        x = tl.load(lower + tl.where((dy >= 0)[None, :], ahead, back) + at, mask=inside)
        if uy != 1:
            there = (((uy // 2 * k + one) * 3 + ux) * c + i) * 3 + vx
            edge = inside & (vy == uy)[None, :]
            x -= tl.load(rows + there[None, :] * c + e[:, None], mask=edge, other=0.0)
        if ux != 1:
            there = (((ux // 2 * k + one) * 3 + uy) * c + i) * 3 + vy
            edge = inside & (vx == ux)[None, :]
            x -= tl.load(columns + there[None, :] * c + e[:, None], mask=edge, other=0.0)
        tl.store(out + (((own * 9 + u) * c + e) * 9)[:, None] + v[None, :], x, mask=inside)


@triton.jit
def _turned(x, out, n, c, places, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = tl.program_id(1)
    for start in range(0, places, BLOCK):
        p = start + tl.arange(0, BLOCK)
        inside = (i[:, None] < c) & (p[None, :] < places)
        t = tl.load(x + ((b * c + i) * places)[:, None] + p[None, :], mask=inside)
        tl.store(out + ((i * n + b) * places)[:, None] + p[None, :], t, mask=inside)
