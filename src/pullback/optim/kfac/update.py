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

from ...steps.trust import clip_factor


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


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all entries are finite, as a Boolean tensor on the first one's device."""
    norms = torch._foreach_norm(list(tensors))
    dtypes = {n.dtype for n in norms}
    if torch.float16 in dtypes:  # norms overflow there
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        norms = torch._foreach_norm(list(tensors), 2, wide)
    if len({(n.dtype, n.device) for n in norms}) > 1:
        norms = [n.to(norms[0].device, torch.float64) for n in norms]
    return torch.isfinite(torch.stack(list(norms)).sum())


def clip_shares(
    shares: Sequence[Share], limit: float, length: Callable[[Mapping[str, Tensor]], Tensor]
) -> None:
    """Shorten what is going to be moved, m = μm + Δ, to η²mᵀF̂m ≤ limit.

    Directions are replaced by c·m − μm_old, so that `move` takes the step η·c·m.

    Args:
        shares: what is going to move.
        limit: δ.
        length: xᵀF̂x for x by parameter name.
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
    """Decay, momentum and the move itself.

    Args:
        shares: parameters with directions of their own dtype, device and layout.
        broken: a float32 number on the device: where it is 1, nothing changes.
    """
    for share in shares:
        if share.decay:
            kept: Any = 1 - share.lr * share.decay
            if broken is not None:
                one = torch.ones_like(broken)
                kept = torch.where(broken > 0, one, one * kept).to(share.params[0].device)
            torch._foreach_mul_(share.params, kept)
        for alike in _by_kind(share):
            _advance(*alike, share.lr, share.momentum, broken)


def _by_kind(share: Share) -> list[tuple[list[Tensor], list[Tensor], list[Tensor]]]:
    """Params, directions and buffers by device and dtype: one kernel knows one of each."""
    kinds = [(p.device, p.dtype) for p in share.params]
    every = share.params, share.directions, share.buffers if share.momentum else []
    if kinds.count(kinds[0]) == len(kinds):
        return [every]
    some = [[i for i, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)]
    return [tuple([held[i] for i in own] if held else [] for held in every) for own in some]  # pyright: ignore[reportReturnType]


def _advance(
    params: list[Tensor],
    directions: list[Tensor],
    buffers: list[Tensor],
    lr: float | Tensor,
    momentum: float,
    broken: Tensor | None,
) -> None:
    """m ← μm + Δ, w ← w − ηm: in one pass over the memory where there is a kernel for it."""
    first = params[0]
    # a rate on the device is read in single precision; on a CPU the kernel is wrong for bfloat16
    exact = isinstance(lr, Tensor) and first.is_cuda and first.dtype != torch.float64
    rate: Any = lr if exact else float(lr)
    plain = first.dtype in (torch.float32, torch.float64)
    if first.is_cuda or (plain and all(p.is_contiguous() for p in params)):
        torch._fused_sgd_(
            params, directions, buffers, weight_decay=0.0, momentum=momentum, lr=rate,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False, grad_scale=None,
            found_inf=None if broken is None else broken.to(first.device),
        )  # fmt: skip
        return
    if momentum:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, directions)
        directions = buffers
    torch._foreach_add_(params, directions, alpha=-rate)


def like_parameter(direction: Tensor, p: Tensor) -> Tensor:
    """The direction in the dtype, device and memory layout of its parameter."""
    same = direction.dtype == p.dtype and direction.device == p.device
    if same and direction.stride() == p.stride():
        return direction
    return torch.empty_like(p).copy_(direction)


class Verdict:
    """What the device found of a step, on its way to the host, which does not wait for it yet.

    Args:
        flags: whether the parameters moved, and whether statistics were taken up.
        learning: whether there were statistics.
    """

    def __init__(self, flags: Tensor, learning: bool) -> None:
        self.learning = learning
        self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=flags.is_cuda)
        self._flags.copy_(flags, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(flags.device))

    def flags(self) -> list[bool]:
        """The flags, as soon as the device has come so far."""
        self._event.synchronize()
        return self._flags.tolist()
