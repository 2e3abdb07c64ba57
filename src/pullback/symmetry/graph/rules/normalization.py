"""Rules for norms. A norm's input loses its scale; gain and shift are a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from ...actions.charts import FixedNorm
from ..ledger import (
    BatchNormReading,
    FixedNormReading,
    NormReading,
    Operation,
    Outputs,
    Producer,
    Reading,
)
from ..scales import FIXED, collapse
from ..values import Activation, ParameterCoordinates, Value
from ..walk import FixedNormUse, Walk, add_constants, operation_name, rule
from .pointwise import add_values, multiply_by_gain

MakeReading = Callable[[Outputs, tuple[int, ...]], Reading]


@rule("native_layer_norm", "_fused_rms_norm")
def follow_layer_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Layer norm over the last axes, and RMS norm."""
    x = walk.as_activation(args[0])
    gain = args[2]
    is_rms = "rms" in operation_name(node)
    shift = None if is_rms else args[3]
    axes = range(-len(args[1]), 0)
    walk.scales.merge(x.scale, axes)
    operation = Operation.LAYER_NORM
    if is_rms or len(axes) > 1:
        operation = Operation.GAIN
        walk.mark_nonlinear(x)
    else:
        _remove_shifts(walk, x, -1, partial(NormReading, is_per_sample=True))
    return add_constants(node, _apply_gain_and_shift(walk, x.shape, gain, shift, operation))


@rule("native_group_norm")
def follow_group_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Group norm over groups of channels."""
    x = walk.as_activation(args[0])
    group_count = int(args[6])
    grouped = x.scale.unflatten(1, (group_count, -1))
    walk.scales.merge(grouped, range(2, grouped.ndim))
    _remove_shifts(walk, x, 1, partial(NormReading, is_per_sample=False), group_count)
    gain = _align_with_channels(args[1], x)
    shift = _align_with_channels(args[2], x)
    normalized = _apply_gain_and_shift(walk, x.shape, gain, shift, Operation.GAIN)
    return add_constants(node, normalized)


@rule(
    *("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "miopen_batch_norm"),
    *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
)
def follow_batch_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Batch norm, with the statistics of the batch or with fixed ones."""
    x = walk.as_activation(args[0])
    gain = _align_with_channels(args[1], x)
    shift = _align_with_channels(args[2], x)
    label = walk.scales.merge(x.scale, [0, *range(2, len(x.shape))])
    has_fixed_statistics = "no_training" in operation_name(node) or args[5] is False
    if not has_fixed_statistics:
        _remove_shifts(walk, x, 1, BatchNormReading)
    elif isinstance(gain, ParameterCoordinates) and isinstance(shift, ParameterCoordinates):
        inputs = Activation.expand(label, x.shape)
        out = multiply_by_gain(walk, inputs, gain, Operation.GAIN)
        norm = _read_statistics(walk, node, args, gain, shift)
        make_reading = partial(FixedNormReading, norm=len(walk.fixed_norms))
        _remove_shifts(walk, x, 1, make_reading)
        walk.fixed_norms.append(FixedNormUse(norm, label.flatten()))
        return add_constants(node, add_values(walk, out, shift))
    else:
        # x ↦ (x − mean)/σ is a fixed map. Scales would pass only with a change of the shift.
        walk.mark_nonlinear(x)
        walk.scales.fix(label)
    normalized = _apply_gain_and_shift(walk, x.shape, gain, shift, Operation.GAIN)
    return add_constants(node, normalized)


def _read_statistics(
    walk: Walk, node: Node, args: list[Any], gain: ParameterCoordinates, shift: ParameterCoordinates
) -> FixedNorm:
    """Return a batch norm's constants; the running mean and variance are arguments 3 and 4."""
    eps = float(args[6] if "no_training" in operation_name(node) else args[7])
    mean, variance = (walk.constants[argument.name] for argument in node.args[3:5])  # pyright: ignore
    return FixedNorm(gain.name, shift.name, mean, (variance + eps).rsqrt())


def _align_with_channels(value: Value | None, x: Activation) -> Value | None:
    """Return a vector (C,) as one that is broadcast to x, (N, C, *positions)."""
    if value is None:
        return None
    position_ones = [1] * (len(x.shape) - 2)
    return value.rearrange(lambda t: t.view(-1, *position_ones))


def _remove_shifts(
    walk: Walk, x: Activation, axis: int, make_reading: MakeReading, group_count: int = 1
) -> None:
    """Record that a norm removes shifts of groups of channels along an axis.

    It is recorded for a group that is outputs of one layer; others are read by something nonlinear.
    """
    units = collapse(x.unit)
    if units.numel() != units.shape[axis]:
        walk.mark_nonlinear(x)
        return
    channel_units = units.flatten().expand(x.shape[axis]).view(group_count, -1)
    channels = torch.arange(channel_units.numel()).view(group_count, -1)
    for group_units, group_channels in zip(channel_units, channels, strict=True):
        if walk.ledger.find_single_producer(group_units) is None:
            walk.ledger.mark_nonlinear(group_units)
        else:
            walk.ledger.add_readings(group_units, group_channels.tolist(), make_reading)


def _apply_gain_and_shift(
    walk: Walk, shape: torch.Size, gain: Any, shift: Any, operation: Operation
) -> Activation:
    """Return normalized values times a gain plus a shift, where there are any."""
    out = Activation.constant(shape)
    if isinstance(gain, ParameterCoordinates):
        out = multiply_by_gain(walk, out, gain, operation)
    elif operation is Operation.LAYER_NORM:
        # Without a gain, too, the outputs of a layer norm sum to zero.
        fixed = torch.full((shape[-1],), FIXED)
        producer = Producer(operation, None, torch.arange(shape[-1]), fixed)
        out = Activation.expand(fixed, shape, walk.ledger.add_producer(producer))
    if shift is None:
        return out
    return add_values(walk, out, shift)
