"""torch's SGD step of some parameters, with their momentum."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd


def sgd_step(
    params: Sequence[Tensor],
    gradients: Sequence[Tensor],
    state: MutableMapping[Tensor, dict[str, Any]],
    *,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
) -> None:
    """v ← momentum·v + g + weight_decay·w, w ← w − lr·v; v is kept in the state of each w."""
    ws, gs = list(params), list(gradients)
    sparse = any(g.is_sparse for g in gs)
    if not (momentum or weight_decay or sparse or isinstance(lr, Tensor)):
        torch._foreach_add_(ws, gs, alpha=-lr)  # what sgd comes to, without its detours
        return
    buffers = [state[w].get("momentum_buffer") if momentum else None for w in ws]
    sgd(
        ws,
        gs,
        buffers,
        has_sparse_grad=sparse,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,  # pyright: ignore[reportArgumentType]
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    if momentum:
        for w, buffer in zip(ws, buffers, strict=True):
            state[w]["momentum_buffer"] = buffer
