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
from .block_stack import Tensors
from .rules import Rule
from .state import KFACState

#: a parameter's own tensors: the last move, and what the KL clip knows of its length
BUFFERS = ("momentum", "length")

#: an optimizer's `state`
State = MutableMapping[Tensor, dict[str, Any]]


def get_momentum_buffer(state: State, p: Tensor) -> Tensor:
    """Return a parameter's momentum, zeros at first, on the parameter's device and in its dtype."""
    buffers = state[p]
    if "momentum" not in buffers:
        buffers["momentum"] = torch.zeros_like(p)
    elif buffers["momentum"].device != p.device or buffers["momentum"].dtype != p.dtype:
        buffers["momentum"] = buffers["momentum"].to(p)
    return buffers["momentum"]


@dataclass
class GroupUpdate:
    """One step of the parameters that share a param group and a rule: m ← c(μm + Δ), w ← w − ηm."""

    names: list[str]
    params: list[Tensor]
    #: Δ for each parameter
    directions: list[Tensor]
    #: m for each parameter; empty where there is no momentum
    momenta: list[Tensor]
    #: η
    lr: float | Tensor
    #: μ
    momentum: float
    decay: float
    #: c, by which a clip shortens the step
    shortening: float = 1.0
    #: the buffers of `clip.get_length_buffer`, one for each parameter, where there is a KL clip
    length_buffers: list[Tensor] = field(default_factory=list)


def make_updates(
    groups: Groups,
    state: State,
    params: ModelParameters,
    directions: Tensors,
    curvature: KFACState,
    *,
    has_momentum: bool,
) -> list[GroupUpdate]:
    """Return the updates that these directions give, one for each param group and rule.

    Without `has_momentum` the momentum of param groups is not used.
    """
    assignment = curvature.assignment
    elementwise = curvature.entry_names
    updates: list[GroupUpdate] = []
    measured = directions.keys() - elementwise
    entries = directions.keys() & elementwise
    for group in groups:
        in_group = params.in_groups([group])
        for rule, with_rule in ((assignment.rule, measured), (assignment.others, entries)):
            names = [name for name in in_group if name in with_rule]
            if rule is not None and names:
                tensors = [in_group[n] for n in names]
                selected = [directions[n] for n in names]
                update = _make_update(
                    group, rule, names, tensors, selected, state, params, has_momentum
                )
                updates.append(update)
    return updates


def _make_update(
    group: Mapping[str, Any],
    rule: Rule,
    names: list[str],
    tensors: list[Tensor],
    directions: list[Tensor],
    state: State,
    params: ModelParameters,
    has_momentum: bool,
) -> GroupUpdate:
    """Return the update of parameters of one group that follow one rule."""
    lr = _find_group_rate(group, rule)
    momentum = 0.0
    if has_momentum and "momentum" in rule.group_options():
        momentum = float(group["momentum"])
    momenta: list[Tensor] = []
    if momentum:
        momenta = [get_momentum_buffer(state, p) for p in tensors]
    pieces, tensors, momenta = params.cut_pieces(names, directions, tensors, momenta)
    if rule.is_elementwise:  # whose directions are pieces already
        pieces = directions
    shaped = [cast_like_parameter(d, p) for d, p in zip(pieces, tensors, strict=True)]
    decay = float(group["weight_decay"])
    return GroupUpdate(names, tensors, shaped, momenta, lr, momentum, decay)


def _find_group_rate(group: Mapping[str, Any], rule: Rule) -> Any:
    """Return the learning rate of a group for a rule, which may take a part of it.

    A tensor on a GPU stays there: reading it would wait.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and not lr.is_cuda:
        lr = float(lr)
    if rule.rate != 1 and not group.get("rule"):
        lr = rule.rate * lr
    return lr


def apply_updates(updates: Sequence[GroupUpdate], is_void: Tensor | None = None) -> None:
    """Set w ← (1 − η·decay)w, m ← c(μm + Δ) and w ← w − ηm, in one pass where there is a kernel.

    Where the float32 flag `is_void` is 1, nothing changes.
    """
    for update in updates:
        decay = update.decay
        if decay and (update.momentum or update.shortening != 1):
            # the kernel's decay is a part of the gradient, which momentum would carry on
            _decay(update, is_void)
            decay = 0.0
        by_device_and_dtype: dict[object, list[int]] = {}
        for i, p in enumerate(update.params):
            by_device_and_dtype.setdefault((p.device, p.dtype), []).append(i)
        for indices in by_device_and_dtype.values():
            _apply_to_uniform(update, indices, decay, is_void)


def _decay(update: GroupUpdate, is_void: Tensor | None) -> None:
    """Set w ← (1 − η·decay)w."""
    factor: Any = 1 - update.lr * update.decay
    if is_void is not None:
        one = update.params[0].new_ones(())
        factor = torch.where(is_void.to(one.device) > 0, one, one * factor)
    torch._foreach_mul_(update.params, factor)


def _apply_to_uniform(
    update: GroupUpdate, indices: list[int], decay: float, is_void: Tensor | None
) -> None:
    """Apply an update to some of its parameters, which share one device and dtype."""
    params = [update.params[i] for i in indices]
    directions = [update.directions[i] for i in indices]
    momenta: list[Tensor] = []
    rate = _convert_rate(update, params[0])
    if update.momentum:
        momenta = [update.momenta[i] for i in indices]
    elif update.shortening != 1:
        rate = update.shortening * rate
    if _has_kernel(params):
        torch._fused_sgd_(
            params, directions, momenta, weight_decay=decay,
            momentum=update.shortening * update.momentum, lr=rate, dampening=1 - update.shortening,
            nesterov=False, maximize=False, is_first_step=False, grad_scale=None,
            found_inf=None if is_void is None else is_void.to(params[0].device),
        )  # fmt: skip
        return
    if update.momentum:
        torch._foreach_mul_(momenta, update.shortening * update.momentum)
        torch._foreach_add_(momenta, directions, alpha=update.shortening)
        directions = momenta
    if decay:
        torch._foreach_mul_(params, 1 - rate * decay)
    torch._foreach_add_(params, directions, alpha=-rate)


def _convert_rate(update: GroupUpdate, p: Tensor) -> Any:
    """Return the learning rate; one on the device stays there, where single precision is enough."""
    if isinstance(update.lr, Tensor) and p.is_cuda and p.dtype != torch.float64:
        return update.lr
    return float(update.lr)


def _has_kernel(params: Sequence[Tensor]) -> bool:
    """Return True if one kernel updates these parameters; that of a CPU is wrong for halves."""
    first = params[0]
    if first.is_cuda:
        return True
    if first.dtype not in (torch.float32, torch.float64):
        return False
    return all(p.is_contiguous() for p in params)


def cast_like_parameter(direction: Tensor, p: Tensor) -> Tensor:
    """Return the direction in the dtype, device and memory layout of its parameter."""
    is_same = direction.dtype == p.dtype and direction.device == p.device
    if is_same and direction.stride() == p.stride():
        return direction
    return torch.empty_like(p).copy_(direction)
