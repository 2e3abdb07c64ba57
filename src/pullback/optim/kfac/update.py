r"""The one update path, with the parameters' momentum: functions on lists of tensors.

    m ← c(μm + Δ),    w ← (1 − η·decay)w − ηm,

with c = 1 unless the step is clipped. Nothing moves where a flag on the device says that a
direction is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._core.shards import Groups, ModelParameters
from .rules import Rule
from .stacks import Tensors
from .state import KFACState

#: a parameter's own tensors: the last move, and what the KL clip knows of its length
BUFFERS = ("momentum", "length")

#: an optimizer's `state`
State = MutableMapping[Tensor, dict[str, Any]]


def get_momentum_buffer(state: State, p: Tensor) -> Tensor:
    """Return the momentum of a parameter, on its device."""
    buffers = state[p]
    if "momentum" not in buffers:
        buffers["momentum"] = torch.zeros_like(p)
    elif buffers["momentum"].device != p.device or buffers["momentum"].dtype != p.dtype:
        buffers["momentum"] = buffers["momentum"].to(p)
    return buffers["momentum"]


@dataclass
class Share:
    """The parameters of one param group and one rule that have a direction."""

    names: list[str]
    params: list[Tensor]
    directions: list[Tensor]
    #: m for each parameter; empty where there is no momentum
    buffers: list[Tensor]
    lr: float | Tensor
    momentum: float
    decay: float
    #: c of m ← c(μm + Δ), what a clip shortens the step by
    factor: float = 1.0
    #: what the KL clip keeps of each parameter: its part of mᵀFm, and of it what is not damping
    lengths: list[Tensor] = field(default_factory=list)


def make_shares(
    groups: Groups,
    state: State,
    params: ModelParameters,
    directions: Tensors,
    curvature: KFACState,
    *,
    has_momentum: bool,
) -> list[Share]:
    """Return the parameters of these directions, by group and rule.

    Without `has_momentum` the momentum of param groups is not used.
    """
    assignment = curvature.assignment
    elementwise = curvature.entry_names
    shares: list[Share] = []
    measured = directions.keys() - elementwise
    entries = directions.keys() & elementwise
    for group in groups:
        in_group = params.in_groups([group])
        for rule, with_rule in ((assignment.rule, measured), (assignment.others, entries)):
            names = [name for name in in_group if name in with_rule]
            if rule is not None and names:
                tensors = [in_group[n] for n in names]
                selected = [directions[n] for n in names]
                share = _make_share(
                    group, rule, names, tensors, selected, state, params, has_momentum
                )
                shares.append(share)
    return shares


def _make_share(
    group: Mapping[str, Any],
    rule: Rule,
    names: list[str],
    tensors: list[Tensor],
    directions: list[Tensor],
    state: State,
    params: ModelParameters,
    has_momentum: bool,
) -> Share:
    """Return the share of parameters of one group that follow one rule."""
    lr = _rate_of(group, rule)
    momentum = 0.0
    if has_momentum and "momentum" in rule.group_options():
        momentum = float(group["momentum"])
    buffers: list[Tensor] = []
    if momentum:
        buffers = [get_momentum_buffer(state, p) for p in tensors]
    pieces, tensors, buffers = params.cut_pieces(names, directions, tensors, buffers)
    if rule.is_elementwise:  # whose directions are pieces already
        pieces = directions
    shaped = [like_parameter(d, p) for d, p in zip(pieces, tensors, strict=True)]
    decay = float(group["weight_decay"])
    return Share(names, tensors, shaped, buffers, lr, momentum, decay)


def _rate_of(group: Mapping[str, Any], rule: Rule) -> Any:
    """Return the rule's share of a group's learning rate; a tensor stays one on a GPU."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and not lr.is_cuda:
        lr = float(lr)
    if rule.rate != 1 and not group.get("rule"):
        lr = rule.rate * lr
    return lr


def move(shares: Sequence[Share], is_void: Tensor | None = None) -> None:
    """Set w ← (1 − η·decay)w, m ← c(μm + Δ) and w ← w − ηm, in one pass where there is a kernel.

    Where the float32 flag `is_void` is 1, nothing changes.
    """
    for share in shares:
        decay = share.decay
        if decay and (share.momentum or share.factor != 1):  # of which the kernel knows no decay
            _decay(share, is_void)
            decay = 0.0
        by_memory: dict[object, list[int]] = {}  # one kernel knows one device and dtype
        for i, p in enumerate(share.params):
            by_memory.setdefault((p.device, p.dtype), []).append(i)
        for indices in by_memory.values():
            _move_one_memory(share, indices, decay, is_void)


def _decay(share: Share, is_void: Tensor | None) -> None:
    """Set w ← (1 − η·decay)w."""
    factor: Any = 1 - share.lr * share.decay
    if is_void is not None:
        one = share.params[0].new_ones(())
        factor = torch.where(is_void.to(one.device) > 0, one, one * factor)
    torch._foreach_mul_(share.params, factor)


def _move_one_memory(
    share: Share, indices: list[int], decay: float, is_void: Tensor | None
) -> None:
    """Move parameters of one device and dtype."""
    params = [share.params[i] for i in indices]
    directions = [share.directions[i] for i in indices]
    buffers: list[Tensor] = []
    rate = _find_rate(share, params[0])
    if share.momentum:
        buffers = [share.buffers[i] for i in indices]
    elif share.factor != 1:
        rate = share.factor * rate
    if _has_kernel(params):
        torch._fused_sgd_(
            params, directions, buffers, weight_decay=decay,
            momentum=share.factor * share.momentum, lr=rate, dampening=1 - share.factor,
            nesterov=False, maximize=False, is_first_step=False, grad_scale=None,
            found_inf=None if is_void is None else is_void.to(params[0].device),
        )  # fmt: skip
        return
    if share.momentum:
        torch._foreach_mul_(buffers, share.factor * share.momentum)
        torch._foreach_add_(buffers, directions, alpha=share.factor)
        directions = buffers
    if decay:
        torch._foreach_mul_(params, 1 - rate * decay)
    torch._foreach_add_(params, directions, alpha=-rate)


def _find_rate(share: Share, p: Tensor) -> Any:
    """Return the learning rate; one on the device stays there, where single precision is enough."""
    if isinstance(share.lr, Tensor) and p.is_cuda and p.dtype != torch.float64:
        return share.lr
    return float(share.lr)


def _has_kernel(params: Sequence[Tensor]) -> bool:
    """Return True if one kernel updates these parameters; that of a CPU is wrong for halves."""
    first = params[0]
    if first.is_cuda:
        return True
    if first.dtype not in (torch.float32, torch.float64):
        return False
    return all(p.is_contiguous() for p in params)


def like_parameter(direction: Tensor, p: Tensor) -> Tensor:
    """Return the direction in the dtype, device and memory layout of its parameter."""
    is_same = direction.dtype == p.dtype and direction.device == p.device
    if is_same and direction.stride() == p.stride():
        return direction
    return torch.empty_like(p).copy_(direction)
