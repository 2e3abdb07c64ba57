"""Rules for layers: matrix products, convolutions and tables.

With a weight, y_i = Σ_j W_ij x_j (+ b_i): each output gets a scale of its own, and
log-scales obey W_ij = y_i − x_j, b_i = y_i. A product of activations, Σ_j x_j y_j, needs
x_j + y_j to be the same for all j. Each column of a table of vectors has a scale of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..ledger import LinearReading, Operation, Producer
from ..scales import ZERO, collapse
from ..values import NO_UNIT, Activation, ParameterCoordinates, Value, has_units
from ..walk import Walk, list_shapes, rule
from .pointwise import add_values, module_name, multiply_by_number

# --- matrix products ------------------------------------------------------------------------


@rule("mm", "mv", "dot", "vdot", "bmm")
def follow_matmul(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Activation:
    """x y, for vectors, matrices or stacks of matrices."""
    x, y = args[:2]
    x = x.rearrange(_stack_left)
    y = y.rearrange(_stack_right)
    shape = list_shapes(node)[0]
    return _multiply(walk, x, y).rearrange(lambda t: t.reshape(shape))


def _stack_left(t: Tensor) -> Tensor:
    """Return the left factor of a product as (b, n, i)."""
    if t.ndim == 1:
        t = t[None]
    if t.ndim == 2:
        t = t[None]
    return t


def _stack_right(t: Tensor) -> Tensor:
    """Return the right factor of a product as (b, i, m)."""
    if t.ndim == 1:
        t = t[:, None]
    if t.ndim == 2:
        t = t[None]
    return t


@rule("addmm", "baddbmm")
def follow_addmm(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Activation:
    """β b + α x y."""
    bias, x, y = args[:3]
    beta = kwargs.get("beta", 1)
    alpha = kwargs.get("alpha", 1)
    if isinstance(y, ParameterCoordinates):
        y = multiply_by_number(walk, y, alpha)
    else:
        x = multiply_by_number(walk, x, alpha)
    product = follow_matmul(walk, node, [x, y], {})
    if beta == 0 or _is_zero(bias):
        return product
    return add_values(walk, product, multiply_by_number(walk, bias, beta))


def _is_zero(value: Value) -> bool:
    """Return True if all entries are structural zeros."""
    return isinstance(value, Activation) and bool((collapse(value.scale) == ZERO).all())


def _multiply(walk: Walk, x: Value, y: Value) -> Activation:
    """Return (b, n, i) · (b, i, m)."""
    if isinstance(x, Activation) and isinstance(y, ParameterCoordinates):
        return _apply_weight(walk, x, y)
    if isinstance(x, ParameterCoordinates) and isinstance(y, Activation):
        transposed = _multiply(walk, y.rearrange(lambda t: t.mT), x.rearrange(lambda t: t.mT))
        return transposed.rearrange(lambda t: t.mT)
    # Two parameters, if these are any, are not scaled.
    x = walk.as_activation(x, fixed=True)
    y = walk.as_activation(y, fixed=True)
    return _multiply_activations(walk, x, y)


def _apply_weight(walk: Walk, x: Activation, weight: ParameterCoordinates) -> Activation:
    """Return x (b, n, i) times a weight (b, i, m), which is often the same for all b."""
    b, n, _ = x.shape
    m = weight.view[2]
    has_stack = any(collapse(c).shape[0] > 1 for c in weight.coordinates)
    if has_stack:
        matrix_count = b
        incoming = walk.scales.merge(x.scale, [1])  # (b, 1, i)
    else:
        matrix_count = 1
        incoming = walk.scales.merge(x.scale, [0, 1])  # (1, 1, i)
    atoms = walk.scales.new_atoms(matrix_count * m, walk.ledger.number_call())
    atoms = atoms.view(matrix_count, 1, m)
    if bool((incoming != ZERO).any()):  # otherwise the weight has no effect
        walk.scale_parameter(weight, atoms, walk.scales.power(incoming.mT, -1))
    units = []
    for k, input_units in enumerate(x.unit.split(b // matrix_count)):
        matrix = weight.rearrange(partial(torch.select, dim=0, index=k))
        units.append(_read_by_matrix(walk, input_units, matrix, atoms[k, 0]))
    return Activation.expand(atoms, (b, n, m), torch.stack(units)[:, None])


def _read_by_matrix(
    walk: Walk, units: Tensor, weight: ParameterCoordinates, atoms: Tensor
) -> Tensor:
    """Record that a linear layer, weight (i, m), reads units (b, n, i); return its units, (m,)."""
    matrix = walk.name_matrix(weight)
    if matrix is None:
        walk.ledger.mark_nonlinear(collapse(units))
        return torch.full((weight.view[1],), NO_UNIT)
    layer = Producer(
        Operation.LINEAR, matrix.name, matrix.rows, atoms, module=module_name(weight.name)
    )
    return _read_by_layer(walk, units, layer, matrix.columns.tolist())


def _read_by_layer(
    walk: Walk, units: Tensor, layer: Producer, columns: Sequence[int], is_padded: bool = False
) -> Tensor:
    """Record that a layer reads units (…, i) at its columns (i,); return its units, (m,)."""
    layer_units = walk.ledger.add_producer(layer)
    number = len(walk.ledger.producers) - 1
    units = collapse(units)
    rows = units.expand(*units.shape[:-1], len(columns)).reshape(-1, len(columns)).unique(dim=0)
    if len(rows) == 1:
        make_reading = partial(LinearReading, reader=number, is_padded=is_padded)
        walk.ledger.add_readings(rows[0], columns, make_reading)
    else:  # different units at different positions: a recurrent layer's outputs at all times
        walk.ledger.mark_nonlinear(units)
    return layer_units


# --- products of activations ----------------------------------------------------------------


def _multiply_activations(walk: Walk, x: Activation, y: Activation) -> Activation:
    """Return the product of activations (b, n, i) · (b, i, m)."""
    b, n, _ = x.shape
    m = y.shape[2]
    x_scale = collapse(x.scale)
    y_scale = collapse(y.scale)
    depends_on_summand = x_scale.shape[2] > 1 or y_scale.shape[1] > 1
    if x_scale.shape[1] > 1 and y_scale.shape[2] > 1 and depends_on_summand:
        # Labels of all n·i·m products would be too many.
        x_scale = walk.scales.merge(x_scale, [1])
        y_scale = walk.scales.merge(y_scale, [2])
    terms = walk.scales.product(x_scale[:, :, :, None], y_scale[:, None])  # (b, n, i, m)
    scale = walk.scales.merge(terms, [2]).squeeze(2)
    return Activation.expand(scale, (b, n, m), _multiply_units(walk, x, y))


def _multiply_units(walk: Walk, x: Activation, y: Activation) -> Tensor:
    """Return the units of a product of activations.

    Units along n or m pass a product with something else (values that attention weights average).
    Units along i on both sides are summed against each other (queries and keys).
    """
    x_units = collapse(x.unit)
    y_units = collapse(y.unit)
    call = walk.ledger.number_call()
    b, n, inner = x.shape
    m = y.shape[2]
    x_has_units = has_units(x_units)
    y_has_units = has_units(y_units)
    if y_has_units and not x_has_units and y_units.shape[1] == 1:
        return _pass_units(walk, y_units.expand(b, 1, m), call)
    if x_has_units and not y_has_units and x_units.shape[2] == 1:
        return _pass_units(walk, x_units.expand(b, n, 1).mT, call).mT
    are_summed = x_units.shape[1] == 1 and y_units.shape[2] == 1
    if x_has_units and y_has_units and are_summed:
        queries = x_units.expand(b, 1, inner)[:, 0]
        keys = y_units.expand(b, inner, 1)[..., 0]
        _add_pairs(walk, queries, keys)
        return torch.tensor(NO_UNIT)
    walk.ledger.mark_nonlinear(x_units)
    walk.ledger.mark_nonlinear(y_units)
    return torch.tensor(NO_UNIT)


def _add_pairs(walk: Walk, queries: Tensor, keys: Tensor) -> None:
    """Record that units (b, i) are summed against each other, for each b."""
    pairs = zip(map(tuple, queries.tolist()), map(tuple, keys.tolist()), strict=True)
    for query, key in set(pairs):
        if NO_UNIT in (*query, *key):
            walk.ledger.mark_nonlinear(torch.tensor([*query, *key]))
            continue
        query_outputs = tuple(walk.ledger.find_output(unit) for unit in query)
        key_outputs = tuple(walk.ledger.find_output(unit) for unit in key)
        walk.ledger.add_pair(query_outputs, key_outputs)


def _pass_units(walk: Walk, units: Tensor, call: int) -> Tensor:
    """Return the new units that units (b, 1, m) become by an operation, the same for all of a b."""
    passed = [[walk.ledger.pass_units(matrix[0], call)] for matrix in units.tolist()]
    return torch.tensor(passed).long()


# --- convolutions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Convolution:
    """The options of a convolution's call.

    Attributes:
        shape: of the output, (N, C, *positions).
        groups: of channels.
        is_transposed: W is (in, out/g, ...) rather than (out, in/g, ...).
        is_padded: whether there are zeros around the input.
    """

    shape: torch.Size
    groups: int
    is_transposed: bool
    is_padded: bool

    @property
    def position_ones(self) -> list[int]:
        """A size of 1 for each axis of positions."""
        return [1] * (len(self.shape) - 2)

    def expand_channels(self, labels: Tensor) -> Tensor:
        """Return labels of channels (C,) on the output."""
        return labels.view(1, -1, *self.position_ones).expand(self.shape)


@rule("convolution", "_convolution")
def follow_convolution(
    walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]
) -> Activation:
    """With a parameter or with a fixed kernel."""
    x = walk.as_activation(args[0])
    weight = args[1]
    bias = args[2]
    options = _Convolution(node.meta["val"].shape, int(args[8]), bool(args[6]), any(args[4]))
    channels = walk.scales.merge(x.scale, [0, *range(2, len(x.shape))]).flatten()
    channels = channels.expand(x.shape[1])
    if isinstance(weight, Activation):
        convolved = _convolve_with_activation(walk, x, weight, channels, options)
    else:
        convolved = _convolve_with_parameter(walk, x, weight, channels, options)
    if bias is None:
        return convolved
    return add_values(walk, convolved, bias.rearrange(lambda t: t.view(-1, *options.position_ones)))


def _convolve_with_activation(
    walk: Walk, x: Activation, weight: Activation, channels: Tensor, options: _Convolution
) -> Activation:
    """Return the convolution with a kernel that is no parameter: one scale for each group."""
    walk.mark_nonlinear(x)
    group_labels = walk.scales.merge(channels.view(options.groups, -1), [1])
    kernel_label = walk.scales.merge(weight.scale, range(len(options.shape))).flatten()[0]
    labels = walk.scales.product(group_labels, kernel_label)
    outputs_per_group = options.shape[1] // options.groups
    labels = labels.expand(options.groups, outputs_per_group).flatten()
    return Activation.expand(options.expand_channels(labels), options.shape)


def _convolve_with_parameter(
    walk: Walk, x: Activation, weight: ParameterCoordinates, channels: Tensor, options: _Convolution
) -> Activation:
    """Return the convolution with a parameter, whose output channels get new atoms."""
    atoms = walk.scales.new_atoms(options.shape[1], walk.ledger.number_call())
    inverse_channels = walk.scales.power(channels, -1)
    if options.is_transposed:
        row_labels = inverse_channels
        column_labels = atoms
    else:
        row_labels = atoms
        column_labels = inverse_channels
    # Column j of a row in group γ is channel (γ, j).
    groups = options.groups
    columns = column_labels.view(groups, 1, -1).expand(-1, len(row_labels) // groups, -1)
    columns = columns.flatten(0, 1)
    walk.scale_parameter(
        weight,
        row_labels.view(-1, 1, *options.position_ones),
        columns.reshape(*columns.shape, *options.position_ones),
    )
    scale = options.expand_channels(atoms)
    units = _read_by_kernel(walk, x, weight, atoms, options)
    if units is None:
        walk.mark_nonlinear(x)
        return Activation.expand(scale, options.shape)
    return Activation.expand(scale, options.shape, options.expand_channels(units))


def _read_by_kernel(
    walk: Walk, x: Activation, weight: ParameterCoordinates, atoms: Tensor, options: _Convolution
) -> Tensor | None:
    """Record that a convolution reads its input's channels; return the units of its outputs, (C,).

    None for groups, which no matrix can pass, and for kernels that are views of a parameter, unless
    they have one position and are a matrix.
    """
    if options.groups > 1:
        return None
    input_units = x.unit.movedim(1, -1)
    if not weight.is_whole:
        if weight.shape[2:].numel() > 1 or options.is_padded or options.is_transposed:
            return None
        matrix = weight.rearrange(lambda t: t.flatten(1).mT)  # (in, out)
        return _read_by_matrix(walk, input_units, matrix, atoms)
    operation = Operation.CONVOLUTION
    if options.is_transposed:
        operation = Operation.TRANSPOSED_CONVOLUTION
    layer = Producer(
        operation,
        weight.name,
        torch.arange(len(atoms)),
        atoms,
        module=module_name(weight.name),
    )
    # A transposed convolution adds up fewer terms at the edges, and often between inputs.
    is_padded = options.is_padded or options.is_transposed
    return _read_by_layer(walk, input_units, layer, range(x.shape[1]), is_padded)


# --- tables ---------------------------------------------------------------------------------


@rule("embedding")
def follow_embedding(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of a table."""
    table = args[0]
    shape = list_shapes(node)[0]
    if isinstance(table, Activation):
        return Activation.expand(walk.scales.merge(table.scale, [0])[0], shape)
    outputs = torch.arange(shape[-1])
    atoms = walk.scales.new_atoms(len(outputs), walk.ledger.number_call())
    walk.scale_parameter(table, atoms)
    producer = Producer(
        Operation.EMBEDDING,
        table.name,
        outputs,
        atoms,
        module=module_name(table.name),
        table=table.scatter(outputs.expand(table.view)),
    )
    return Activation.expand(atoms, shape, walk.ledger.add_producer(producer))
