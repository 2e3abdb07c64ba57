"""Products with the exact Gram along a few directions: one forward-mode pass for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

from ...._core.attention import unfused_attention
from ...._core.capture import Call, Selector, plain, select
from ...._core.space import compute_dtype
from ....maps.module import in_every_slot
from ....metrics import Metric


def products(
    model: nn.Module,
    calls: Sequence[Call],
    metric: Metric,
    params: Mapping[str, Tensor],
    span: Sequence[Mapping[str, Tensor]],
    *,
    output: Selector,
    batch_dim: int,
    reduction: str,
) -> list[list[Tensor]]:
    """x_iᵀ G x_j for directions x_i by name, with G = mean JᵀMJ over the calls' samples."""
    total: list[list[Tensor]] = []
    samples = 0.0
    for call in calls:
        values, pushed = _pushed(model, call, params, span, output)

        def arranged(z: Tensor) -> Tensor:
            z = z.movedim(batch_dim, 0).to(compute_dtype(z.dtype))
            return z[:, None] if z.ndim == 1 else z

        z, tangents = arranged(values), [arranged(t) for t in pushed]
        factor = metric.factor(z, inputs=_inputs(call, batch_dim, len(z)))
        share = 1.0
        if call.cotangent is not None:
            mask = metric.counted(z, arranged(call.cotangent))
            if mask is not None:
                tangents = [t * mask for t in tangents]
                share = float(mask.to(z.dtype).mean())
        white = [factor.transpose(t) for t in tangents]
        found = [[(a * b).sum() for b in white] for a in white]
        total = (
            [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(total, found, strict=True)]
            if total
            else found
        )
        samples += metric.samples(z) * share
    scale = 1.0 if reduction == "sum" else 1 / max(samples, 1.0)
    return [[x * scale for x in row] for row in total]


def _pushed(
    model: nn.Module,
    call: Call,
    params: Mapping[str, Tensor],
    span: Sequence[Mapping[str, Tensor]],
    output: Selector,
) -> tuple[Tensor, list[Tensor]]:
    """z and J x for every direction x."""
    inner = plain(model)
    here = {n: p.detach() for n, p in params.items()}
    recorded = call.buffers if call.buffers is not None else dict(inner.named_buffers())

    def value(point: dict[str, Tensor]) -> Tensor:
        buffers = {n: b.clone() for n, b in recorded.items()}
        tensors = in_every_slot(inner, {**buffers, **point})
        args: Any = call.args
        out = functional_call(inner, tensors, args, call.kwargs, tie_weights=False, strict=False)
        return select(out, output)

    with torch.no_grad(), unfused_attention(), call.replaying():
        pairs = []
        for x in span:
            tangents = {n: x[n].to(p.dtype) for n, p in here.items()}
            pairs.append(jvp(value, (here,), (tangents,)))
    return pairs[0][0].detach(), [t.detach() for _, t in pairs]


def _inputs(call: Call, batch_dim: int, samples: int) -> Tensor | None:
    tensors = call.tensors
    if not tensors:
        return None
    x = tensors[0]
    if x.ndim > batch_dim and x.shape[batch_dim] == samples:
        return x.movedim(batch_dim, 0)
    return x
