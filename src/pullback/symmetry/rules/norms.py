"""Rules for normalization, of activations and of weights.

What goes into a norm loses its scale; gain and shift are a linear layer. For weights,
W = g v/‖v‖ with norms over all axes but one, (g, v) ↦ W is onto: whatever may be done to W can be
done to g and v. W is a parameter of its own for the walk, and the length of v means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..actions.charts import NormalizedWeight
from ..graph.ledger import NONE, Act, Producer, Ref
from ..graph.scales import FIXED, collapse
from ..graph.walk import Walk, rule, shapes
from .pointwise import added, gained


@rule("native_layer_norm", "_fused_rms_norm")
def layer_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Over the last axes; also RMS norm."""
    act = walk.act(args[0])
    rms = "rms" in str(node.target)
    over = list(range(-len(args[1]), 0))
    walk.scales.merge(act.scale, over)
    units = collapse(act.unit)
    if not rms and len(over) == 1 and units.numel() == units.shape[-1]:
        _removed(walk, units.flatten().expand(act.shape[-1]), [list(range(act.shape[-1]))], True)
    else:
        walk.touch(act)
    gain, shift = args[2], None if rms else args[3]
    kind = "gain" if rms or len(over) > 1 else "layer_norm"
    return _outputs(node, _affine(walk, act.shape, gain, shift, kind))


@rule("native_group_norm")
def group_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Over groups of channels."""
    act, groups = walk.act(args[0]), int(args[6])
    tail = [1] * (len(act.shape) - 2)
    parts = act.scale.unflatten(1, (groups, -1))
    walk.scales.merge(parts, range(2, parts.ndim))
    channels = torch.arange(act.shape[1]).view(groups, -1).tolist()
    _channels(walk, act, channels)
    gain, shift = (v if v is None else v.moved(lambda t: t.view(-1, *tail)) for v in args[1:3])
    return _outputs(node, _affine(walk, act.shape, gain, shift, "gain"))


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
        _channels(walk, act, [list(range(act.shape[1]))], "null")
        return _outputs(node, _affine(walk, act.shape, gain, shift, "gain"))
    # x ↦ (x − mean)/σ is a fixed map: scales pass only together with a change of the shift
    if not isinstance(gain, Ref) or not isinstance(shift, Ref):
        walk.touch(act)
        walk.scales.fix(label)
        return _outputs(node, _affine(walk, act.shape, gain, shift, "gain"))
    out = gained(walk, Act.of(label, act.shape), gain, "gain")
    eps = float(args[6] if "no_training" in str(node.target) else args[7])
    source = [walk.names.get(a.name, "") for a in node.args[3:5]]  # pyright: ignore
    _channels(walk, act, [list(range(act.shape[1]))], "fold", fold=len(walk.folds))
    walk.folds.append(Fold(gain.name, shift.name, source[0], source[1], eps, label.flatten()))
    return _outputs(node, added(walk, out, shift))


@dataclass(frozen=True)
class Fold:
    """A batch norm with fixed statistics: y = g (x − mean)/σ + β, and the labels of x (C,)."""

    gain: str
    shift: str
    mean: str
    variance: str
    eps: float
    labels: Tensor


def _channels(
    walk: Walk, act: Act, groups: list[list[int]], kind: str = "norm", **more: Any
) -> None:
    units = collapse(act.unit)
    if units.numel() == units.shape[1]:
        _removed(walk, units.flatten().expand(act.shape[1]), groups, False, kind, **more)
    else:
        walk.touch(act)


def _removed(
    walk: Walk,
    units: Tensor,
    groups: list[list[int]],
    inputs: bool,
    kind: str = "norm",
    **more: Any,
) -> None:
    """A shift common to the channels of a group is taken away; with `inputs`, of each sample."""
    for group in groups:
        chosen = units[group]
        if bool((chosen == NONE).any()) or walk.ledger.one_producer(chosen) is None:
            walk.ledger.touch(chosen)
        else:
            walk.ledger.read(kind, chosen, group, inputs=inputs, **more)


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


def _outputs(node: Node, out: Act) -> Any:
    value = node.meta["val"]
    if not isinstance(value, (list, tuple)):
        return out
    return [out, *(Act.constant(tuple(v.shape)) for v in value[1:])]


@rule("_weight_norm_interface", "_weight_norm")
def weight_norm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Of v and g; also the norms of v."""
    v, g = args[:2]
    dim = int(args[2] if len(args) > 2 else kwargs.get("dim", 0))
    shape, *others = shapes(node)
    whole = isinstance(v, Ref) and isinstance(g, Ref) and v.view == v.sizes and g.view == g.sizes
    if not whole or not 0 <= dim % len(shape) < len(shape):
        return NotImplemented
    name = f"{v.name}, normalized"
    walk.directions[name] = NormalizedWeight(g.name, v.name, dim % len(shape))
    out = Ref.whole(name, shape)
    several = isinstance(node.meta.get("val"), (list, tuple))
    return [out, *(Act.constant(other) for other in others)] if several else out
