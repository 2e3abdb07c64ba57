"""Rules for normalization: what goes in loses its scale; gain and shift are a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..actions.charts import FixedNorm
from ..graph.ledger import Act, Producer, Ref
from ..graph.scales import FIXED, collapse
from ..graph.walk import Walk, rule, with_constants
from .pointwise import added, gained


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Over the last axes; also RMS norm."""
    act = walk.act(args[0])
    rms = "rms" in str(node.target)
    over = list(range(-len(args[1]), 0))
    walk.scales.merge(act.scale, over)
    if rms or len(over) > 1:
        walk.touch(act)
    else:
        _removed(walk, act, -1, inputs=True)
    gain, shift = args[2], None if rms else args[3]
    kind = "gain" if rms or len(over) > 1 else "layer_norm"
    return with_constants(node, _affine(walk, act.shape, gain, shift, kind))


@rule("native_group_norm")
def group_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Over groups of channels."""
    act, groups = walk.act(args[0]), int(args[6])
    tail = [1] * (len(act.shape) - 2)
    parts = act.scale.unflatten(1, (groups, -1))
    walk.scales.merge(parts, range(2, parts.ndim))
    _removed(walk, act, 1, groups)
    gain, shift = (v if v is None else v.moved(lambda t: t.view(-1, *tail)) for v in args[1:3])
    return with_constants(node, _affine(walk, act.shape, gain, shift, "gain"))


@rule(
    *("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "miopen_batch_norm"),
    *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
)
def batch_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """With the statistics of the batch, or with fixed ones."""
    act = walk.act(args[0])
    frozen = "no_training" in str(node.target) or args[5] is False
    tail = [1] * (len(act.shape) - 2)
    gain, shift = (v if v is None else v.moved(lambda t: t.view(-1, *tail)) for v in args[1:3])
    label = walk.scales.merge(act.scale, [0, *range(2, len(act.shape))])
    if not frozen:
        _removed(walk, act, 1, kind="null")
        return with_constants(node, _affine(walk, act.shape, gain, shift, "gain"))
    # x ↦ (x − mean)/σ is a fixed map: scales pass only together with a change of the shift
    if not isinstance(gain, Ref) or not isinstance(shift, Ref):
        walk.touch(act)
        walk.scales.fix(label)
        return with_constants(node, _affine(walk, act.shape, gain, shift, "gain"))
    out = gained(walk, Act.of(label, act.shape), gain, "gain")
    eps = float(args[6] if "no_training" in str(node.target) else args[7])
    mean, variance = (walk.constants[a.name] for a in node.args[3:5])  # pyright: ignore
    _removed(walk, act, 1, kind="fold", fold=len(walk.folds))
    norm = FixedNorm(gain.name, shift.name, mean, (variance + eps).rsqrt())
    walk.folds.append((norm, label.flatten()))
    return with_constants(node, added(walk, out, shift))


def _removed(
    walk: Walk,
    act: Act,
    axis: int,
    groups: int = 1,
    inputs: bool = False,
    kind: str = "norm",
    **more: Any,
) -> None:
    """A shift common to a group of channels is taken away; with `inputs`, of each sample."""
    units = collapse(act.unit)
    if units.numel() != units.shape[axis]:
        walk.touch(act)
        return
    channels = units.flatten().expand(act.shape[axis]).view(groups, -1)
    for group, chosen in zip(
        torch.arange(channels.numel()).view(groups, -1), channels, strict=True
    ):
        if walk.ledger.one_producer(chosen) is None:
            walk.ledger.touch(chosen)
        else:
            walk.ledger.read(kind, chosen, group.tolist(), inputs=inputs, **more)


def _affine(walk: Walk, shape: torch.Size, gain: Any, shift: Any, kind: str) -> Act:
    """The normalized values times a gain plus a shift."""
    out = Act.constant(shape)
    if isinstance(gain, Ref):
        out = gained(walk, out, gain, kind)
    elif kind == "layer_norm":
        out = _bare(walk, shape)
    return out if shift is None else added(walk, out, shift)


def _bare(walk: Walk, shape: torch.Size) -> Act:
    """A layer norm without gain still has outputs that sum to zero."""
    fixed = torch.full((shape[-1],), FIXED)
    made = Producer("layer_norm", None, torch.arange(shape[-1]), fixed)
    return Act.of(fixed, shape, walk.ledger.produce(made))
