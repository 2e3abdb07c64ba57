"""Rules for layers: matrix products, convolutions, tables and normalization.

With a weight, y_i = Σ_j W_ij x_j (+ b_i): each output gets a scale of its own, and
log-scales obey W_ij = y_i − x_j, b_i = y_i. A product of activations, Σ_j x_j y_j, needs
x_j + y_j to be the same for all j. Each column of a table of vectors has a scale of its own.
What goes into a norm loses its scale; gain and shift are a linear layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..actions.charts import FixedNorm
from .ledger import NONE, Act, Producer, Ref, Value
from .pointwise import added, gained, scaled
from .scales import FIXED, ZERO, collapse
from .walk import Walk, rule, shapes, with_constants


@rule("mm", "mv", "dot", "vdot", "bmm")
def matmul(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Act:
    """x y, for vectors, matrices or stacks of matrices."""
    x, y = args[:2]
    row, column = len(x.shape) == 1, len(y.shape) == 1
    x = x.moved(lambda t: t.view(1, *([1] if row else []), *t.shape) if t.ndim < 3 else t)
    y = y.moved(lambda t: t.view(1, *t.shape, *([1] if column else [])) if t.ndim < 3 else t)
    return product(walk, x, y).moved(lambda t: t.reshape(shapes(node)[0]))


@rule("addmm", "baddbmm")
def addmm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Act:
    """β b + α x y."""
    bias, x, y = args[:3]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if isinstance(y, Ref):
        y = scaled(walk, y, alpha)
    else:
        x = scaled(walk, x, alpha)
    out = matmul(walk, node, [x, y], {})
    zero = isinstance(bias, Act) and bool((collapse(bias.scale) == ZERO).all())
    if zero or beta == 0:
        return out
    return added(walk, out, scaled(walk, bias, beta))


def product(walk: Walk, x: Value, y: Value) -> Act:
    """(b, n, i) · (b, i, m)."""
    if isinstance(x, Act) and isinstance(y, Ref):
        return linear(walk, x, y)
    if isinstance(x, Ref) and isinstance(y, Act):
        turned = product(walk, y.moved(lambda t: t.mT), x.moved(lambda t: t.mT))
        return turned.moved(lambda t: t.mT)
    if isinstance(x, Ref) and isinstance(y, Ref):
        x, y = walk.act(x, fixed=True), walk.act(y, fixed=True)
    return paired(walk, x, y)  # pyright: ignore[reportArgumentType]


def linear(walk: Walk, x: Act, weight: Ref) -> Act:
    """x (b, n, i) times a weight (b, i, m), which is often the same for all b."""
    b, n, _ = x.shape
    several = any(c.shape[0] > 1 for c in map(collapse, weight.coords))
    incoming = walk.scales.merge(x.scale, [1] if several else [0, 1])  # (b', 1, i)
    count, m = (b if several else 1), weight.view[2]
    atoms = walk.scales.fresh(count * m, walk.ledger.call()).view(count, 1, m)
    if bool((incoming != ZERO).any()):  # else the weight is not seen
        walk.hold(weight, atoms, walk.scales.power(incoming.mT, -1))
    units = [
        _matrix_reader(walk, part, weight.moved(lambda t, k=k: t[k]), atoms[k, 0])
        for k, part in enumerate(x.unit.split(b // count))
    ]
    return Act.of(atoms, (b, n, m), torch.stack(units)[:, None])


def _matrix_reader(walk: Walk, units: Tensor, weight: Ref, atoms: Tensor) -> Tensor:
    """A linear layer with weight (i, m) reads units (b, n, i): its own, (m,)."""
    found = walk.matrix(weight)
    if found is None:
        walk.ledger.touch(collapse(units))
        return torch.full((weight.view[1],), NONE)
    name, rows, columns = found
    made = Producer("linear", name, rows, atoms, about=weight.name.rpartition(".")[0])
    return _reader(walk, units, made, columns.tolist())


def _reader(
    walk: Walk, units: Tensor, made: Producer, columns: list[int], padded: bool = False
) -> Tensor:
    """A layer reads units (…, i) at columns (i,): its own, (m,)."""
    own, small = walk.ledger.produce(made), collapse(units)
    flat = small.expand(*small.shape[:-1], len(columns))
    lines = flat.reshape(-1, len(columns)).unique(dim=0)
    if len(lines) == 1:
        reader = len(walk.ledger.producers) - 1
        walk.ledger.read("linear", lines[0], columns, reader=reader, padded=padded)
    else:  # outputs of a recurrent layer at all times
        walk.ledger.touch(small)
    return own


def paired(walk: Walk, x: Act, y: Act) -> Act:
    """A product of activations (b, n, i) · (b, i, m)."""
    b, n, _ = x.shape
    m = y.shape[2]
    left, right = collapse(x.scale), collapse(y.scale)
    if left.shape[1] > 1 and right.shape[2] > 1 and max(left.shape[2], right.shape[1]) > 1:
        left, right = walk.scales.merge(left, [1]), walk.scales.merge(right, [2])
    terms = walk.scales.product(left[:, :, :, None], right[:, None])  # (b', n', i', m')
    scale = walk.scales.merge(terms, [2]).squeeze(2)
    return Act.of(scale, (b, n, m), _paired_units(walk, x, y))


def _paired_units(walk: Walk, x: Act, y: Act) -> Tensor:
    """Units that pass a product with something else, or are summed against each other."""
    left, right = collapse(x.unit), collapse(y.unit)
    call, (b, n, _), m = walk.ledger.call(), x.shape, y.shape[2]
    some, other = bool((left != NONE).any()), bool((right != NONE).any())
    if other and not some and right.shape[1] == 1:
        return _sliced(walk, right.expand(b, 1, m), call)
    if some and not other and left.shape[2] == 1:
        return _sliced(walk, left.expand(b, n, 1).mT, call).mT
    if some and other and left.shape[1] == 1 and right.shape[2] == 1:
        first, second = left.expand(b, 1, x.shape[2])[:, 0], right.expand(b, x.shape[2], 1)[..., 0]
        for one, two in {
            (tuple(o), tuple(t)) for o, t in zip(first.tolist(), second.tolist(), strict=True)
        }:
            if NONE in (*one, *two):
                walk.ledger.touch(torch.tensor([*one, *two]))
                continue
            rows = [tuple(walk.ledger.row(u) for u in side) for side in (one, two)]
            walk.ledger.pair(*rows)
        return torch.tensor(NONE)
    walk.ledger.touch(left)
    walk.ledger.touch(right)
    return torch.tensor(NONE)


def _sliced(walk: Walk, units: Tensor, call: int) -> Tensor:
    """Units (b, 1, m) after an operation that is the same for the channels of each slice b."""
    return torch.tensor([[walk.ledger.passed(line[0], call)] for line in units.tolist()]).long()


@rule("convolution", "_convolution")
def convolution(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Act:
    """With a parameter or with a fixed kernel."""
    x, weight, bias = walk.act(args[0]), args[1], args[2]
    padding, transposed, groups = args[4], bool(args[6]), int(args[8])
    shape = node.meta["val"].shape
    channels = walk.scales.merge(x.scale, [0, *range(2, len(x.shape))]).flatten()  # (C,)
    channels = channels.expand(x.shape[1])
    if isinstance(weight, Act):
        walk.touch(x)
        parts = walk.scales.merge(channels.view(groups, -1), [1])
        label = walk.scales.product(
            parts, walk.scales.merge(weight.scale, range(len(shape))).flatten()[0]
        )
        out = Act.of(_spread(label.expand(groups, shape[1] // groups).flatten(), shape), shape)
    else:
        out = _conv(walk, x, weight, channels, shape, groups, transposed, padding)
    if bias is None:
        return out
    tail = [1] * (len(shape) - 2)
    return added(walk, out, bias.moved(lambda t: t.view(-1, *tail)))


def _conv(
    walk: Walk,
    x: Act,
    weight: Ref,
    channels: Tensor,
    shape: torch.Size,
    groups: int,
    transposed: bool,
    padding: Any,
) -> Act:
    """A convolution with a parameter; W is (out, in/g, ...), transposed (in, out/g, ...)."""
    atoms = walk.scales.fresh(shape[1], walk.ledger.call())
    down = walk.scales.power(channels, -1)
    first, second = (down, atoms) if transposed else (atoms, down)
    tail = [1] * (len(shape) - 2)
    rows = first.view(-1, 1, *tail)
    # column j' of a row in group γ is channel (γ, j')
    columns = second.view(groups, 1, -1).expand(-1, len(first) // groups, -1).flatten(0, 1)
    walk.hold(weight, rows, columns.reshape(*columns.shape, *tail))
    unit = torch.tensor(NONE)
    if groups > 1 or transposed or not weight.complete:
        walk.touch(x)
    else:
        about = weight.name.rpartition(".")[0]
        made = Producer("conv", weight.name, torch.arange(len(atoms)), atoms, about=about)
        unit = _reader(walk, x.unit.movedim(1, -1), made, [*range(x.shape[1])], any(padding))
    return Act.of(_spread(atoms, shape), shape, _spread(unit, shape) if unit.ndim else unit)


def _spread(labels: Tensor, shape: torch.Size) -> Tensor:
    """Labels of channels on (N, C, ...)."""
    return labels.view(1, -1, *[1] * (len(shape) - 2)).expand(shape)


@rule("embedding")
def embedding(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of a table."""
    table, shape = args[0], shapes(node)[0]
    if isinstance(table, Act):
        return Act.of(walk.scales.merge(table.scale, [0])[0], shape)
    line = torch.arange(shape[-1])
    atoms = walk.scales.fresh(len(line), walk.ledger.call())
    walk.hold(table, atoms)
    entries, about = table.placed(line.expand(table.view)), table.name.rpartition(".")[0]
    made = Producer("embedding", table.name, line, atoms, table=entries, about=about)
    return Act.of(atoms, shape, walk.ledger.produce(made))


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
