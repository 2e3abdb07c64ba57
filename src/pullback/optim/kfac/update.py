r"""The one update path, with the parameters' buffers: functions on lists of tensors.

    m ← μm + Δ,   m ← m·min(1, √(δ/(η²mᵀF̂m))),   w ← (1 − η·decay)w − ηm,

and nothing moves where a flag on the device says that a direction is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..._core.shards import Groups, ModelParameters
from ...steps.wrappers import clip_factor

#: a parameter's own tensors: momentum, or Adam's moments
BUFFERS = ("momentum", "first", "second")
_EPS = 1e-8  # Adam's

#: by parameter name
Tensors = Mapping[str, Tensor]
#: an optimizer's `state`
State = MutableMapping[Tensor, dict[str, Any]]


def buffer_of(state: State, p: Tensor, name: str = "momentum") -> Tensor:
    """Return one of the parameter's own buffers, on its device."""
    own = state[p]
    if name not in own:
        own[name] = torch.zeros_like(p)
    elif own[name].device != p.device or own[name].dtype != p.dtype:
        own[name] = own[name].to(p)
    return own[name]


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


def shares_of(
    groups: Groups, state: State, params: ModelParameters, given: Tensors, moving: bool
) -> list[Share]:
    """Return the parameters of these directions, by group.

    Where the step is `moving` by its last move, all have momentum.
    """
    shares = []
    for group in groups:
        names, own = params.select_from_group(group, given)
        if not own:
            continue
        momentum, lr = float(group.get("momentum", 0.0)), group["lr"]
        buffers = [buffer_of(state, p) for p in own] if momentum or moving else []
        if isinstance(lr, Tensor) and not lr.is_cuda:
            lr = float(lr)
        some, own, buffers = params.cut_pieces(names, [given[n] for n in names], own, buffers)
        some, decay = list(map(like_parameter, some, own)), float(group["weight_decay"])
        shares.append(Share(names, own, some, buffers, lr, momentum, decay))
    return shares


class Guard:
    """Whether a step goes on: asked at once, or by a flag on the device that guards every change.

    Where it is `deferred`, the host does not wait: `broken` is 1 where nothing may change.
    """

    def __init__(self, deferred: bool, good: Tensor | None = None) -> None:
        self.deferred, self.good = deferred, good

    def holds(self, flag: Tensor) -> bool:
        """Ask for one more condition; False where it is known to fail."""
        if not self.deferred:
            return bool(flag)
        self.good = flag if self.good is None else self.good & flag
        return True

    @property
    def broken(self) -> Tensor | None:
        """A float32 flag, or None where nothing is deferred."""
        return None if self.good is None else (~self.good).float()


def adam_move(
    groups: Groups, state: State | None, params: ModelParameters, gradients: Tensors, step: int,
    rest: float, broken: Tensor | None,
) -> None:  # fmt: skip
    """Take AdamW's step number `step`, from 1 on, along these gradients.

    Without a `state` it is a first step, whose moments are not kept. The rate is the share `rest`
    of a group's, and all of it in a group with a rule of its own. Nothing moves where the flag
    `broken` is 1.
    """
    for group in groups:
        names, own = params.select_from_group(group, gradients)
        moments = (
            [torch.zeros_like(p) if state is None else buffer_of(state, p, part) for p in own]
            for part in BUFFERS[1:]
        )
        lists = params.cut_pieces(names, [gradients[n] for n in names], own, *moments)
        kinds: dict[torch.device, list[int]] = {}
        for i, p in enumerate(own):
            kinds.setdefault(p.device, []).append(i)
        for device, some in kinds.items():
            given, moved, first, second = ([every[i] for i in some] for every in lists)
            steps = torch.full((len(some),), step - 1.0, device=device).unbind()
            like = zip(moved, given, strict=True)
            fused = all(p.stride() == g.stride() and p.dtype == g.dtype for p, g in like)
            adamw(
                moved, given, first, second, [], list(steps), fused=fused,
                found_inf=None if broken is None else broken.to(device), amsgrad=False,
                beta1=group["betas"][0], beta2=group["betas"][1],
                lr=group["lr"] if group["rule"] else rest * group["lr"],
                weight_decay=float(group["weight_decay"]), eps=_EPS, maximize=False,
            )  # fmt: skip


def clip_shares(shares: Sequence[Share], limit: float, length: Callable[[Tensors], Tensor]) -> None:
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
    """Set w ← (1 − η·decay)w, m ← μm + Δ and w ← w − ηm, in one pass where there is a kernel.

    Where the float32 flag `broken` is 1, nothing changes.
    """
    for share in shares:
        lr, momentum, decay = share.lr, share.momentum, share.decay
        if decay and momentum:  # of which the kernel knows no decay
            kept: Any = 1 - lr * decay
            if broken is not None:
                one = share.params[0].new_ones(())
                kept = torch.where(broken.to(one.device) > 0, one, one * kept)
            torch._foreach_mul_(share.params, kept)
            decay = 0.0
        kinds: dict[object, list[int]] = {}  # one kernel knows one device and dtype
        for i, p in enumerate(share.params):
            kinds.setdefault((p.device, p.dtype), []).append(i)
        every = share.params, share.directions, share.buffers if momentum else []
        for own in kinds.values():
            params, directions, buffers = ([some[i] for i in own] if some else [] for some in every)
            first = params[0]
            # a rate on the device is read in single precision
            exact = isinstance(lr, Tensor) and first.is_cuda and first.dtype != torch.float64
            rate: Any = lr if exact else float(lr)
            plain = first.dtype in (torch.float32, torch.float64)  # on a CPU it is wrong for halves
            if first.is_cuda or (plain and all(p.is_contiguous() for p in params)):
                torch._fused_sgd_(
                    params, directions, buffers, weight_decay=decay, momentum=momentum, lr=rate,
                    dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
                    grad_scale=None, found_inf=None if broken is None else broken.to(first.device),
                )  # fmt: skip
                continue
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
