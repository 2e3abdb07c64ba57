"""Softmax, and the sums of runs of probabilities, from which classes are drawn."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def softmax(z: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """Probabilities of (R, C) in the precision of z, and their sums over runs, (R, ⌈C/run⌉)."""
    rows, classes = z.shape
    count = triton.cdiv(classes, run)
    p = torch.empty_like(z)
    sums = torch.empty(rows, count, dtype=torch.float32, device=z.device)
    with torch.cuda.device_of(z):
        _softmax[(rows,)](z, p, sums, classes, count, RUN=run, BLOCK=_BLOCK, num_warps=8)
    return p, sums


def tried(device: torch.device) -> None:
    """Compile and launch it."""
    for dtype in (torch.float32, torch.bfloat16):  # which older devices do not know
        softmax(torch.zeros(1, 8, dtype=dtype, device=device), 256)


@triton.jit
def _softmax(z, p, sums, classes, count, RUN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        inside = start + c < classes
        x = tl.load(z + row * classes + start + c, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        new = tl.maximum(top, x)
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.exp(x - base)  # NaN where x is not finite
        top = new
    most = tl.max(top, 0)
    scale = 1 / tl.sum(total * tl.exp(top - most), 0)
    r = tl.arange(0, BLOCK // RUN)
    for start in range(0, classes, BLOCK):
        inside = start + c < classes
        x = tl.load(z + row * classes + start + c, mask=inside, other=float("-inf"))
        y = (tl.exp(x.to(tl.float32) - most) * scale).to(p.dtype.element_ty)
        tl.store(p + row * classes + start + c, y, mask=inside)
        y = tl.where(inside, y, 0.0).to(tl.float32)
        at = start // RUN + r
        tl.store(
            sums + row * count + at, tl.sum(tl.reshape(y, (BLOCK // RUN, RUN)), 1), mask=at < count
        )
