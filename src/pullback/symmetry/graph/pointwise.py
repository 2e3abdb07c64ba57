"""Rules for functions of single entries, and for sums, extrema and softmax along axes."""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .ledger import NONE, Act, Producer, Ref, Value
from .scales import FIXED, collapse
from .walk import Walk, result, rule, shapes, with_constants

#: below this an added number is taken for a guard against division by zero
_GUARD = 1e-3


@rule("add", "sub", "rsub", "maximum", "minimum", "fmax", "fmin")
def add(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Both sides have one scale."""
    x, y = args[:2]
    if not isinstance(y, (Act, Ref)):
        act = walk.act(x)
        walk.touch(act)
        if abs(y) > _GUARD:
            walk.scales.fix(act.scale)
        return act.plain()
    if isinstance(x, Ref) and isinstance(y, Act):
        x, y = y, x
    if "add" not in str(node.target) or kwargs.get("alpha", 1) != 1:
        # for scales like a sum, for constants not
        one = walk.act(x)
        walk.touch(one)
        if isinstance(y, Act):
            walk.touch(y)
            y = y.plain()
        return added(walk, one.plain(), y)
    return added(walk, walk.act(x), y)


def added(walk: Walk, x: Act, y: Value) -> Act:
    """x + y; a parameter y is scaled as x is, and may be the bias of the layer that made x."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if isinstance(y, Ref):
        y = _table(walk, x, y)
    if isinstance(y, Act):
        scale = walk.scales.unify(x.scale, y.scale)
        return Act.of(scale, shape, _summed(walk, x, y, shape))
    x = x.moved(lambda t: t.expand(shape))
    labels = walk.reduced(x.scale, y.shape)
    walk.hold(y, labels.expand(y.view).clamp(min=FIXED))
    if not _is_bias(walk, x, y):
        walk.touch(x)
        x = x.plain()
    return x


def _summed(walk: Walk, x: Act, y: Act, shape: torch.Size) -> Tensor:
    """The units of a sum of two layers' outputs, or of one and an input."""
    sides = [collapse(a.unit) for a in (x, y)]
    if all(s.numel() == 1 for s in sides) and any(bool((s != NONE).all()) for s in sides):
        lines = [s.flatten() for s in sides]
        if (made := walk.ledger.add(*lines)) is not None:
            return made.expand(shape)
    sides = _of_features(walk, (x, y), sides)
    axes = {_axis(s) for s in sides if bool((s != NONE).any())}
    if len(axes) == 1 and (axis := axes.pop()) is not None:
        n = shape[axis]
        lines = [s.flatten().expand(n) for s in sides if s.numel() in (1, n)]
        if len(lines) == 2 and (made := walk.ledger.add(*lines)) is not None:
            return made.view(n, *[1] * (-axis - 1)).expand(shape)
    walk.touch(x, y)
    return torch.tensor(NONE)


def _of_features(walk: Walk, acts: tuple[Act, Act], sides: list[Tensor]) -> list[Tensor]:
    """Outputs along two axes, as of a layer that mixes places: the later one's are followed."""
    axes = [a for s in sides if (a := _axis(s)) is not None]
    if len(set(axes)) < 2:
        return sides
    earlier = axes.index(min(axes))
    walk.touch(acts[earlier])
    return [torch.tensor([NONE]) if i == earlier else s for i, s in enumerate(sides)]


def _axis(units: Tensor) -> int | None:
    """The one axis on which units differ, counted from the end."""
    wide = [d - units.ndim for d, n in enumerate(units.shape) if n > 1]
    return wide[0] if len(wide) == 1 else None


def _table(walk: Walk, x: Act, y: Ref) -> Value:
    """A parameter with a vector for each place, as positions have, is a layer without inputs."""
    wide = [a for a, n in enumerate(y.view) if n > 1]
    units = collapse(x.unit)
    if len(wide) < 2 or units.numel() != max(units.shape) or bool((units == NONE).any()):
        return y
    axis = units.shape.index(units.numel()) - units.ndim
    if -axis > len(y.view) or y.view[axis] != units.numel():
        return y
    labels = walk.reduced(x.scale.expand(torch.broadcast_shapes(x.shape, y.shape)), y.shape)
    walk.hold(y, labels.expand(y.view).clamp(min=FIXED))
    shape = [units.numel() if a == axis % len(y.view) else 1 for a in range(len(y.view))]
    line = torch.arange(units.numel())
    table = y.placed(line.view(shape).expand(y.view))
    fixed = torch.full_like(line, FIXED)
    made = walk.ledger.produce(Producer("table", y.name, line, fixed, table=table, about=y.name))
    return Act.of(labels, y.view, made.view(shape))


def _is_bias(walk: Walk, x: Act, y: Ref) -> bool:
    """Whether y holds a number for each output of the layer, or of the layers, that made x."""
    units, places = torch.broadcast_tensors(collapse(x.unit), y.places())
    pairs = sorted(zip(units.flatten().tolist(), places.flatten().tolist(), strict=True))
    if pairs[0][0] == NONE or any(len({*some}) < len(pairs) for some in zip(*pairs, strict=True)):
        return False
    layers: dict[int, list[tuple[int, int]]] = {}
    for unit, place in pairs:
        layers.setdefault(walk.ledger.row(unit)[0], []).append((unit, place))
    found = []
    for some in layers.values():
        made = walk.ledger.one_producer(torch.tensor([unit for unit, _ in some]))
        if made is None or made[0].bias is not None or made[1] != list(range(len(made[0].rows))):
            return False
        found.append((made[0], torch.tensor([place for _, place in some])))
    name = walk.vector(y)
    for made, rows in found:
        made.bias, made.bias_rows, made.bias_size = name, rows, prod(y.sizes)
    return True


@rule("mul", "div")
def mul(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Scales multiply."""
    x, y = args[:2]
    sign = -1 if "div" in str(node.target) else 1
    if kwargs.get("rounding_mode") is not None:
        return NotImplemented
    if not isinstance(y, (Act, Ref)):
        return scaled(walk, x, y if sign > 0 or not y else 1 / y)
    if sign > 0 and isinstance(x, Ref) and isinstance(y, Act):
        x, y = y, x
    if sign > 0 and isinstance(x, Act) and isinstance(y, Ref):
        return gained(walk, x, y, "gain")
    one, two = walk.act(x), walk.act(y)
    walk.touch(one, two)
    shape = torch.broadcast_shapes(one.shape, two.shape)
    return Act.of(walk.scales.product(one.scale, two.scale, sign), shape)


def scaled(walk: Walk, value: Value, number: Any) -> Value:
    """A value times a number; a parameter stays one that may be read as a weight."""
    real = isinstance(number, (int, float)) and number and isfinite(number)
    return value.times(number) if isinstance(value, Ref) and real else walk.act(value)


def gained(walk: Walk, x: Act, gain: Ref, kind: str) -> Act:
    """x times a parameter: a linear layer for each entry by itself."""
    shape = torch.broadcast_shapes(x.shape, gain.shape)
    walk.touch(x)
    if gain.shape.numel() > 2**16:
        fixed = walk.act(gain, fixed=True)
        return Act.of(walk.scales.product(x.scale, fixed.scale), shape)
    count = gain.shape.numel()
    atoms = walk.scales.fresh(count, walk.ledger.call()).view(gain.shape)
    if count == 1:  # one number for all: it adds its scale to those that there are
        walk.hold(gain, atoms)
        return Act.of(walk.scales.product(x.scale.expand(shape), atoms), shape)
    incoming = walk.reduced(x.scale.expand(shape), gain.shape)
    walk.hold(gain, atoms, walk.scales.power(incoming.clamp(min=FIXED), -1).expand(gain.view))
    unit = torch.tensor(NONE)
    wide = [a for a, n in enumerate(gain.view) if n > 1]
    if len(gain.sizes) == 1 and len(wide) == 1:
        about = gain.name.rpartition(".")[0]
        made = Producer(kind, gain.name, torch.arange(count), atoms.flatten(), about=about)
        unit = walk.ledger.produce(made).view(gain.view)
    return Act.of(atoms, shape, unit)


@rule(
    *("relu", "leaky_relu", "abs", "neg", "_prelu_kernel", "native_dropout"),
    *("rrelu_with_noise", "rrelu_with_noise_functional"),
)
def homogeneous(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """f(αx) = αf(x) for α > 0."""
    for slope in args[1:]:
        if isinstance(slope, Ref):
            walk.act(slope, fixed=True)
    act = walk.act(args[0])
    walk.touch(act)
    return with_constants(node, act.plain())


@rule("glu")
def glu(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Act:
    """x σ(y) for the halves x and y of a tensor: homogeneous in the first."""
    act, dim = walk.act(args[0]), args[1] if len(args) > 1 else -1
    walk.touch(act)
    value, gate = act.scale.chunk(2, dim)
    walk.scales.fix(gate)
    return Act.of(value, value.shape)


@rule("threshold", "clamp", "clamp_min", "clamp_max", "hardtanh")
def clipped(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Homogeneous where the bounds are 0, ±∞ or none."""
    bounds = [*args[1:], *kwargs.values()]
    if any(
        b is not None
        and (not isinstance(b, (int, float)) or b not in (0, float("inf"), float("-inf")))
        for b in bounds
    ):
        return NotImplemented
    return homogeneous(walk, node, args[:1], {})


@rule("pow", "square", "sqrt", "rsqrt", "reciprocal")
def powers(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Scales are raised to the power, where it stays whole."""
    name = str(node.target)
    known = {"square": (2, 1), "rsqrt": (-1, 2), "sqrt": (1, 2), "reciprocal": (-1, 1)}
    top = next((v for k, v in known.items() if k in name), None)
    if top is None:
        exponent = args[1]
        if not isinstance(exponent, (int, float)) or float(2 * exponent) % 1:
            return NotImplemented
        top = (int(2 * exponent), 2)
    act = walk.act(args[0])
    walk.touch(act)
    return Act.of(walk.scales.power(act.scale, *top), act.shape)


@rule(
    *("sum", "mean", "amax", "amin", "max", "min", "cumsum", "std", "var"),
    *("linalg_vector_norm", "norm"),
)
def reduced(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One scale along the axes that are summed over."""
    act, name = walk.act(args[0]), str(getattr(node.target, "_opname", ""))
    shape, ndim = shapes(node)[0], len(act.shape)
    given = args[2:] if "norm" in name else args[1:]
    spec = kwargs.get("dim", given[0] if given else None)
    dims = [spec] if isinstance(spec, int) else list(spec or range(ndim))
    dims = [d % ndim for d in dims]
    merged = walk.scales.merge(act.scale, dims) if dims else act.scale
    if name == "var":
        merged = walk.scales.power(merged, 2)
    # a mean over places is an output of the layer like any
    units = collapse(act.unit)
    if name != "mean" or any(units.shape[d] > 1 for d in dims) or not act.shape.numel():
        walk.touch(act)
        units = torch.tensor(NONE)
    if len(shape) != ndim:
        merged, units = _without(merged, dims), _without(units, dims)
    return with_constants(node, Act.of(merged, shape, units))


def _without(t: Tensor, dims: list[int]) -> Tensor:
    """Axes of size 1 left out."""
    return t.reshape([n for d, n in enumerate(t.shape) if d not in dims])


@rule("_softmax", "_log_softmax", "_safe_softmax")
def softmax(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Fixes scales; takes a common shift away."""
    act, dim = walk.act(args[0]), args[1]
    units = collapse(act.unit)
    walk.scales.fix(act.scale)
    if units.numel() == units.shape[dim] and bool((units != NONE).all()):
        walk.ledger.read("softmax", units.flatten().expand(act.shape[dim]), range(act.shape[dim]))
    else:
        walk.touch(act)
    return result(node, torch.tensor(FIXED))
