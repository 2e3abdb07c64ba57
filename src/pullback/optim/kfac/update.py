r"""The one update path: pure functions on lists of tensors.

    m ← μm + Δ,   m ← m·min(1, √(δ/(η²mᵀF̂m))),   w ← (1 − η·decay)w − ηm,

and nothing moves where a flag on the device says that a direction is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ...steps.trust import clip_factor

_EPS = 1e-8  # Adam's


@dataclass
class Share:
    """The parameters of one param group that have a gradient, with their directions."""

    names: list[str]
    params: list[Tensor]
    directions: list[Tensor]
    #: m for each parameter; empty where there is no momentum
    buffers: list[Tensor]
    lr: float | Tensor
    momentum: float
    decay: float


@dataclass
class AdamShare:
    """The parameters of one param group that follow AdamW, with gradients and both moments."""

    params: list[Tensor]
    gradients: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    lr: float | Tensor
    betas: tuple[float, float]
    decay: float


def adam_move(shares: Sequence[AdamShare], step: int, broken: Tensor | None = None) -> None:
    """Take AdamW's step number `step`, from 1 on; nothing moves where the flag `broken` is 1."""
    for share in shares:
        kinds: dict[torch.device, list[int]] = {}
        for i, p in enumerate(share.params):
            kinds.setdefault(p.device, []).append(i)
        for device, own in kinds.items():
            lists = (share.params, share.gradients, share.first, share.second)
            params, gradients, first, second = ([some[i] for i in own] for some in lists)
            steps = torch.full((len(own),), step - 1.0, device=device).unbind()
            like = zip(params, gradients, strict=True)
            fused = all(p.stride() == g.stride() and p.dtype == g.dtype for p, g in like)
            adamw(
                params, gradients, first, second, [], list(steps), fused=fused,
                found_inf=None if broken is None else broken.to(device), amsgrad=False,
                beta1=share.betas[0], beta2=share.betas[1], lr=share.lr, weight_decay=share.decay,
                eps=_EPS, maximize=False,
            )  # fmt: skip


def clip_shares(
    shares: Sequence[Share], limit: float, length: Callable[[Mapping[str, Tensor]], Tensor]
) -> None:
    """Shorten the coming move m = μm + Δ to η²mᵀF̂m ≤ limit, where `length` returns xᵀF̂x.

    Directions are replaced by c·m − μm_old, so that `move` takes the step η·c·m.
    """
    moved: dict[str, Tensor] = {}
    for share in shares:
        if share.momentum:
            share.directions = list(
                torch._foreach_add(share.directions, share.buffers, alpha=share.momentum)
            )
        own = zip(share.names, share.directions, strict=True)
        moved |= {name: share.lr * direction for name, direction in own}
    c = clip_factor(length(moved), limit)
    for share in shares:
        share.directions = [d * c.to(d.device, d.dtype) for d in share.directions]
        if share.momentum:
            torch._foreach_add_(share.directions, share.buffers, alpha=-share.momentum)


def move(shares: Sequence[Share], broken: Tensor | None = None) -> None:
    """Apply decay, momentum and the move; where the float32 flag `broken` is 1, nothing changes."""
    for share in shares:
        if share.decay and share.momentum:
            kept: Any = 1 - share.lr * share.decay
            if broken is not None:
                one = share.params[0].new_ones(())
                kept = torch.where(broken.to(one.device) > 0, one, one * kept)
            torch._foreach_mul_(share.params, kept)
        kinds: dict[object, list[int]] = {}  # one kernel knows one device and dtype
        for i, p in enumerate(share.params):
            kinds.setdefault((p.device, p.dtype), []).append(i)
        every = share.params, share.directions, share.buffers if share.momentum else []
        for own in kinds.values():
            params, directions, buffers = ([some[i] for i in own] if some else [] for some in every)
            decay = 0.0 if share.momentum else share.decay
            _advance(params, directions, buffers, share.lr, share.momentum, decay, broken)


def _advance(
    params: list[Tensor],
    directions: list[Tensor],
    buffers: list[Tensor],
    lr: float | Tensor,
    momentum: float,
    decay: float,
    broken: Tensor | None,
) -> None:
    """Set m ← μm + Δ, w ← w − ηm: in one pass over the memory where there is a kernel for it.

    Without momentum the decay is part of it: w ← w − η(Δ + decay·w).
    """
    first = params[0]
    # a rate on the device is read in single precision; on a CPU the kernel is wrong for bfloat16
    exact = isinstance(lr, Tensor) and first.is_cuda and first.dtype != torch.float64
    rate: Any = lr if exact else float(lr)
    plain = first.dtype in (torch.float32, torch.float64)
    if first.is_cuda or (plain and all(p.is_contiguous() for p in params)):
        torch._fused_sgd_(
            params, directions, buffers, weight_decay=decay, momentum=momentum, lr=rate,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False, grad_scale=None,
            found_inf=None if broken is None else broken.to(first.device),
        )  # fmt: skip
        return
    if momentum:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, directions)
        directions = buffers
    if decay:
        torch._foreach_mul_(params, 1 - rate * decay)
    torch._foreach_add_(params, directions, alpha=-rate)


def like_parameter(direction: Tensor, p: Tensor) -> Tensor:
    """Return the direction in the dtype, device and memory layout of its parameter."""
    same = direction.dtype == p.dtype and direction.device == p.device
    if same and direction.stride() == p.stride():
        return direction
    return torch.empty_like(p).copy_(direction)
