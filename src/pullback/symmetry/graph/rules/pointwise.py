"""Rules for sums, products and functions of single entries."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..ledger import Operation, Producer
from ..scales import FIXED, collapse
from ..values import NO_UNIT, Activation, ParameterCoordinates, Value, has_units
from ..walk import LIMITS, Walk, add_constants, operation_name, rule
from .bias import attach_bias


@dataclass(frozen=True)
class PointwiseThresholds:
    """Numbers that decide how pointwise operations are read.

    Attributes:
        guard: an added number up to this size is taken for a guard against division by zero, as
            the eps of norms written by hand (1e-12 to 1e-3). Verification rejects what a larger
            effect of it spoils.
    """

    guard: float = 1e-3


THRESHOLDS = PointwiseThresholds()


# --- sums -----------------------------------------------------------------------------------


@rule("add", "sub", "rsub", "maximum", "minimum", "fmax", "fmin")
def follow_sum(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Both sides have one scale."""
    x, y = args[:2]
    if not isinstance(y, Value):
        return _add_number(walk, x, y)
    if isinstance(x, ParameterCoordinates) and isinstance(y, Activation):
        x, y = y, x
    x = walk.as_activation(x)
    if "add" in operation_name(node) and kwargs.get("alpha", 1) == 1:
        return add_values(walk, x, y)
    # Scales behave as in a sum. Constants do not: they are not followed.
    walk.mark_nonlinear(x)
    if isinstance(y, Activation):
        walk.mark_nonlinear(y)
        y = y.without_units()
    return add_values(walk, x.without_units(), y)


def _add_number(walk: Walk, x: Value, number: float) -> Activation:
    """x + number fixes the scale of x, unless the number is a guard."""
    x = walk.as_activation(x)
    walk.mark_nonlinear(x)
    if abs(number) > THRESHOLDS.guard:
        walk.scales.fix(x.scale)
    return x.without_units()


def add_values(walk: Walk, x: Activation, y: Value) -> Activation:
    """Return x + y; a parameter y is scaled as x is, and may be the bias of the layer behind x."""
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if isinstance(y, ParameterCoordinates):
        y = _read_table(walk, x, y)
    if isinstance(y, Activation):
        scale = walk.scales.unify(x.scale, y.scale)
        return Activation.expand(scale, shape, _add_units(walk, x, y, shape))
    x = x.rearrange(lambda t: t.expand(shape))
    _scale_addend(walk, x.scale, y)
    if attach_bias(walk, x, y):
        return x
    walk.mark_nonlinear(x)
    return x.without_units()


def _scale_addend(walk: Walk, labels: Tensor, y: ParameterCoordinates) -> Tensor:
    """Scale a parameter as what it is added to, with these labels; return those in its shape."""
    labels = walk.merge_to_shape(labels, y.shape)
    walk.scale_parameter(y, labels.expand(y.view).clamp(min=FIXED))
    return labels


def _read_table(walk: Walk, x: Activation, y: ParameterCoordinates) -> Value:
    """Return a parameter that holds a vector for each position as a layer without inputs.

    Such are learned positions, which are added to the outputs x of a layer. Other parameters are
    returned as they are.
    """
    # Axes along which a bias was expanded do not make it a table.
    varying_axes = [axis for axis, size in enumerate(y.positions().shape) if size > 1]
    units = collapse(x.unit)
    if len(varying_axes) < 2 or units.numel() != max(units.shape) or bool((units == NO_UNIT).any()):
        return y
    count = units.numel()
    axis = units.shape.index(count) - units.ndim
    if -axis > len(y.view) or y.view[axis] != count:
        return y
    labels = x.scale.expand(torch.broadcast_shapes(x.shape, y.shape))
    labels = _scale_addend(walk, labels, y)
    shape = [1] * len(y.view)
    shape[axis] = count
    outputs = torch.arange(count)
    producer = Producer(
        Operation.TABLE,
        y.name,
        outputs,
        torch.full_like(outputs, FIXED),
        module=y.name,
        table=y.scatter(outputs.view(shape).expand(y.view)),
    )
    return Activation.expand(labels, y.view, walk.ledger.add_producer(producer).view(shape))


def _add_units(walk: Walk, x: Activation, y: Activation, shape: torch.Size) -> Tensor:
    """Return the units of a sum of two layers' outputs, or of one layer's and an input."""
    x_units = collapse(x.unit)
    y_units = collapse(y.unit)
    if x_units.numel() == 1 and y_units.numel() == 1 and _any_is_unit(x_units, y_units):
        units = walk.ledger.add_sum(x_units.flatten(), y_units.flatten())
        if units is not None:
            return units.expand(shape)
    x_axis = _find_unit_axis(x_units)
    y_axis = _find_unit_axis(y_units)
    if x_axis is not None and y_axis is not None and x_axis != y_axis:
        # One side has outputs along an earlier axis, as of a layer that mixes positions. Only the
        # outputs along the later axis are followed.
        if x_axis < y_axis:
            walk.mark_nonlinear(x)
            x_units = torch.tensor([NO_UNIT])
        else:
            walk.mark_nonlinear(y)
            y_units = torch.tensor([NO_UNIT])
    units = _add_units_along_axis(walk, x_units, y_units, shape)
    if units is not None:
        return units
    walk.mark_nonlinear(x, y)
    return torch.tensor(NO_UNIT)


def _any_is_unit(*units: Tensor) -> bool:
    """Return True if all entries of one of the tensors are outputs of a layer."""
    return any(bool((side != NO_UNIT).all()) for side in units)


def _find_unit_axis(units: Tensor) -> int | None:
    """Return the one axis along which units differ, counted from the end."""
    axes = [axis - units.ndim for axis, size in enumerate(units.shape) if size > 1]
    if len(axes) != 1:
        return None
    return axes[0]


def _add_units_along_axis(
    walk: Walk, x_units: Tensor, y_units: Tensor, shape: torch.Size
) -> Tensor | None:
    """Return the units of a sum along the one axis on which both sides' units differ."""
    sides = [x_units, y_units]
    axes = {_find_unit_axis(side) for side in sides if has_units(side)}
    if len(axes) != 1:
        return None
    axis = axes.pop()
    if axis is None:
        return None
    count = shape[axis]
    if any(side.numel() not in (1, count) for side in sides):
        return None
    left, right = (side.flatten().expand(count) for side in sides)
    units = walk.ledger.add_sum(left, right)
    if units is None:
        return None
    return units.view(count, *[1] * (-axis - 1)).expand(shape)


# --- products -------------------------------------------------------------------------------


@rule("mul", "div")
def follow_product(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Scales multiply."""
    if kwargs.get("rounding_mode") is not None:
        return NotImplemented
    x, y = args[:2]
    is_division = "div" in operation_name(node)
    if not isinstance(y, Value):
        if is_division and y:
            y = 1 / y
        return multiply_by_number(walk, x, y)
    if is_division:
        return _multiply_activations(walk, x, y, sign=-1)
    if isinstance(x, ParameterCoordinates) and isinstance(y, Activation):
        x, y = y, x
    if isinstance(x, Activation) and isinstance(y, ParameterCoordinates):
        return multiply_by_gain(walk, x, y, Operation.GAIN)
    return _multiply_activations(walk, x, y, sign=1)


def _multiply_activations(walk: Walk, x: Value, y: Value, sign: int) -> Activation:
    """Return x·y^sign."""
    x = walk.as_activation(x)
    y = walk.as_activation(y)
    walk.mark_nonlinear(x, y)
    shape = torch.broadcast_shapes(x.shape, y.shape)
    return Activation.expand(walk.scales.product(x.scale, y.scale, sign), shape)


def multiply_by_number(walk: Walk, value: Value, number: Any) -> Value:
    """Return a value times a number; a parameter stays one that may be read as a weight."""
    is_regular = isinstance(number, (int, float)) and number and isfinite(number)
    if isinstance(value, ParameterCoordinates) and is_regular:
        return value.times(number)
    return walk.as_activation(value)


def multiply_by_gain(
    walk: Walk, x: Activation, gain: ParameterCoordinates, operation: Operation
) -> Activation:
    """Return x times a parameter: a linear layer for each entry by itself."""
    shape = torch.broadcast_shapes(x.shape, gain.shape)
    count = gain.shape.numel()
    walk.mark_nonlinear(x)
    if count > LIMITS.atoms:
        fixed = walk.as_activation(gain, fixed=True)
        return Activation.expand(walk.scales.product(x.scale, fixed.scale), shape)
    atoms = walk.scales.new_atoms(count, walk.ledger.number_call()).view(gain.shape)
    if count == 1:  # one number for all entries adds its scale to theirs
        walk.scale_parameter(gain, atoms)
        return Activation.expand(walk.scales.product(x.scale.expand(shape), atoms), shape)
    incoming = walk.merge_to_shape(x.scale.expand(shape), gain.shape)
    inverse = walk.scales.power(incoming.clamp(min=FIXED), -1)
    walk.scale_parameter(gain, atoms, inverse.expand(gain.view))
    varying_axes = [axis for axis, size in enumerate(gain.view) if size > 1]
    if len(gain.sizes) != 1 or len(varying_axes) != 1:
        return Activation.expand(atoms, shape)
    producer = Producer(
        operation, gain.name, torch.arange(count), atoms.flatten(), module=module_name(gain.name)
    )
    return Activation.expand(atoms, shape, walk.ledger.add_producer(producer).view(gain.view))


def module_name(parameter_name: str) -> str:
    """Return the name of the module that holds a parameter."""
    return parameter_name.rpartition(".")[0]


# --- functions of one entry -----------------------------------------------------------------


@rule(
    *("relu", "leaky_relu", "abs", "neg", "_prelu_kernel", "native_dropout"),
    *("rrelu_with_noise", "rrelu_with_noise_functional"),
)
def follow_homogeneous(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """f(αx) = αf(x) for α > 0."""
    for slope in args[1:]:
        if isinstance(slope, ParameterCoordinates):
            walk.as_activation(slope, fixed=True)
    x = walk.as_activation(args[0])
    walk.mark_nonlinear(x)
    return add_constants(node, x.without_units())


@rule("glu")
def follow_glu(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Activation:
    """x σ(y) for the halves x and y of a tensor: homogeneous in the first."""
    activation = walk.as_activation(args[0])
    dim = args[1] if len(args) > 1 else -1
    walk.mark_nonlinear(activation)
    value, gate = activation.scale.chunk(2, dim)
    walk.scales.fix(gate)
    return Activation.expand(value, value.shape)


@rule("threshold", "clamp", "clamp_min", "clamp_max", "hardtanh")
def follow_clamp(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Homogeneous where the bounds are 0, ±∞ or none."""
    bounds = [*args[1:], *kwargs.values()]
    if not all(map(_is_scale_free_bound, bounds)):
        return NotImplemented
    return follow_homogeneous(walk, node, args[:1], {})


def _is_scale_free_bound(bound: Any) -> bool:
    if bound is None:
        return True
    return isinstance(bound, (int, float)) and bound in (0, float("inf"), float("-inf"))


#: exponents of operations that have a fixed one, as (numerator, denominator)
_EXPONENTS = {"square": (2, 1), "rsqrt": (-1, 2), "sqrt": (1, 2), "reciprocal": (-1, 1)}


@rule("pow", "square", "sqrt", "rsqrt", "reciprocal")
def follow_power(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return x^(k/2), whose scales are those of x to the same power; other powers have no rule."""
    fraction = _EXPONENTS.get(operation_name(node).removesuffix("_"))
    if fraction is None:
        exponent = args[1]
        if not isinstance(exponent, (int, float)) or float(2 * exponent) % 1:
            return NotImplemented
        fraction = (int(2 * exponent), 2)
    numerator, denominator = fraction
    x = walk.as_activation(args[0])
    walk.mark_nonlinear(x)
    return Activation.expand(walk.scales.power(x.scale, numerator, denominator), x.shape)
