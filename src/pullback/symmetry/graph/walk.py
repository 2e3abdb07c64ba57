"""A walk along a model's graph that finds how each parameter may be rescaled."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..actions.charts import Chart, FixedNorm, ReshapedParameter
from .example import Example
from .ledger import Ledger
from .scales import FIXED, Legs, Scales, collapse, equate_uses
from .values import Activation, ParameterCoordinates, Value, find_matrix

#: a rule takes the walk, the node, its arguments and its keyword arguments, with values in place of
#: nodes. It returns the node's value, or NotImplemented where it does not apply.
Rule = Callable[["Walk", Node, list[Any], dict[str, Any]], Any]

#: the rule for an operation, by the operation's name (`aten` packet)
RULES: dict[str, Rule] = {}


@dataclass(frozen=True)
class WalkLimits:
    """Sizes above which a walk does not look at single entries.

    Attributes:
        atoms: of a parameter that is read like an activation or multiplied entry by entry. Each
            entry would get an unknown of its own, about 1 kB of Python objects: 64 MB at most.
    """

    atoms: int = 2**16


LIMITS = WalkLimits()


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, also for their in-place forms."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
            RULES[name + "_"] = function
        return function

    return register


@dataclass
class ParameterRegion:
    """Positions along a parameter's first axis that are scaled in one way.

    Attributes:
        mask: the positions, (size of the first axis,).
        legs: arrays of labels whose sum is the log-scale of each entry.
    """

    mask: Tensor
    legs: Legs


@dataclass(frozen=True)
class FixedNormUse:
    """A batch norm with fixed statistics in the graph.

    Attributes:
        norm: its constants and parameters.
        labels: of its inputs, (C,).
    """

    norm: FixedNorm
    labels: Tensor


@dataclass(frozen=True)
class NamedMatrix:
    """A block of a matrix, under the name that stands for the matrix.

    Attributes:
        name: the parameter's where it is the matrix, else a name in `Walk.matrices`.
        rows: of the block's outputs.
        columns: of the block's inputs.
    """

    name: str
    rows: Tensor
    columns: Tensor


@dataclass
class Walk:
    """The state of a walk.

    Attributes:
        scales: the equations between log-scales.
        ledger: linear layers, and who reads their outputs.
        regions: how the parameters that were met are scaled, by name.
        notes: sentences on what was given up, and why.
        fixed_norms: batch norms with fixed statistics.
        matrices: weights and biases that are held in another shape, or used times a number, by the
            names that stand for them.
        constants: frozen parameters and buffers, by the names of the graph's placeholders.
    """

    scales: Scales = field(default_factory=Scales)
    ledger: Ledger = field(default_factory=Ledger)
    regions: dict[str, list[ParameterRegion]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    fixed_norms: list[FixedNormUse] = field(default_factory=list)
    matrices: dict[str, Chart] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    #: how the axes of a parameter were first merged to a matrix, by name
    _matrix_axes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def run(self, graph: Graph, example: Example) -> None:
        """Walk the graph of an example's call and fix the scales of its outputs."""
        values: dict[Node, Any] = {}
        unread_count = {node: len(node.users) for node in graph.nodes}
        parameter_names = iter(example.params)
        constants = iter(example.fixed.values())
        for node in graph.nodes:
            if node.op == "placeholder" and (name := next(parameter_names, None)) is not None:
                values[node] = ParameterCoordinates.whole(name, list_shapes(node)[0])
            elif node.op in ("placeholder", "get_attr"):
                values[node] = Activation.constant(list_shapes(node)[0])
                if (constant := next(constants, None)) is not None:
                    self.constants[node.name] = constant
            elif node.op == "output":
                self._fix_outputs(_substitute(node.args, values)[0])
            else:
                values[node] = self._apply_rule(node, values)
            for argument in node.all_input_nodes:  # free values that nothing reads any more
                unread_count[argument] -= 1
                if not unread_count[argument]:
                    values.pop(argument, None)

    def _fix_outputs(self, outputs: Any) -> None:
        """Require that the model's outputs are not scaled."""
        for value in outputs:
            if isinstance(value, Value):
                activation = self.as_activation(value)
                self.mark_nonlinear(activation)
                self.scales.fix(activation.scale)

    def _apply_rule(self, node: Node, values: dict[Node, Any]) -> Any:
        """Return the value of an operation's node."""
        args = _substitute(node.args, values)
        kwargs = _substitute(node.kwargs, values)
        if node.target is operator.getitem:
            results = args[0]
            if isinstance(results, (list, tuple)):
                return results[args[1]]
            return results
        name = operation_name(node)
        if name == "copy_":
            return args[1]
        if name in RULES:
            value = RULES[name](self, node, list(args), dict(kwargs))
            if value is not NotImplemented:
                return value
        return self.give_up(node, args, kwargs)

    def give_up(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Fix the scales of an operation's inputs; return its results with fixed scales.

        This is for operations without a rule that applies.
        """
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Value):
                activation = self.as_activation(value, fixed=True)
                self.mark_nonlinear(activation)
                self.scales.fix(activation.scale)
        return label_results(node, torch.tensor(FIXED))

    def add_note(self, note: str) -> None:
        """Add a sentence, once."""
        if note not in self.notes:
            self.notes.append(note)

    # --- parameters ------------------------------------------------------------------------

    def scale_parameter(self, entries: ParameterCoordinates, *labels: Tensor) -> None:
        """Require that the entries are scaled by the sum of these labels (broadcast to the view).

        A parameter that is used again must be scaled in the same way as before.
        """
        legs: Legs = {}
        for label in labels:
            array = entries.scatter(label)
            shape = tuple(array.shape)
            if shape in legs:
                array = self.scales.product(legs[shape], array)
            legs[shape] = array
        mask = entries.make_first_axis_mask()
        regions = self.regions.setdefault(entries.name, [])
        for region in regions:
            if bool((region.mask & mask).any()):
                self._equate_region(region, mask, legs)
                return
        regions.append(ParameterRegion(mask, legs))

    def _equate_region(self, region: ParameterRegion, mask: Tensor, legs: Legs) -> None:
        """Require that a region is scaled by these legs, too; overlaps in part are not scaled."""
        if bool((region.mask == mask).all()):
            region.legs = equate_uses(self.scales, region.legs, legs)
            return
        for array in (*legs.values(), *region.legs.values()):
            self.scales.fix(array)

    def as_activation(self, value: Value, *, fixed: bool = False) -> Activation:
        """Return a value as an activation; a parameter gets an atom for each entry.

        All entries of a `fixed` or very large parameter are required not to be scaled.
        """
        if isinstance(value, Activation):
            return value
        coordinates = torch.broadcast_tensors(*[collapse(c) for c in value.coordinates])
        shape = torch.Size()
        if coordinates:
            shape = coordinates[0].shape
        if fixed or shape.numel() > LIMITS.atoms:
            label = torch.tensor(FIXED)
        else:
            label = self.scales.new_atoms(shape.numel(), self.ledger.number_call()).view(shape)
        self.scale_parameter(value, label.expand(value.view))
        return Activation.expand(label, value.view)

    def name_matrix(self, weight: ParameterCoordinates) -> NamedMatrix | None:
        """Return the matrix that a view (in, out) is in, by name, with its rows and columns there.

        None where an axis of the parameter counts both inputs and outputs, or where the axes were
        merged in another way before.
        """
        entries = find_matrix(weight)
        if entries is None:
            return None
        matrix = entries.matrix
        if self._matrix_axes.setdefault(weight.name, matrix.axes) != matrix.axes:
            return None
        parameter = ReshapedParameter(weight.name, ((0,), (1,)))
        return NamedMatrix(self._find_name(matrix, parameter), entries.rows, entries.columns)

    def name_vector(self, bias: ParameterCoordinates) -> str:
        """Return a name for the vector of all entries of a parameter, as they are used."""
        all_axes = tuple(range(len(bias.sizes)))
        vector = ReshapedParameter(bias.name, (all_axes,), (), bias.factor)
        return self._find_name(vector, ReshapedParameter(bias.name, ((0,),)))

    def _find_name(self, reshaped: ReshapedParameter, parameter: ReshapedParameter) -> str:
        """Return a name for a reshaped parameter; the parameter's own where it is the same."""
        if reshaped == parameter:
            return parameter.name
        name = f"{reshaped.name}, axes {reshaped.axes} at {reshaped.at}, times {reshaped.factor}"
        self.matrices[name] = reshaped
        return name

    # --- activations -----------------------------------------------------------------------

    def mark_nonlinear(self, *activations: Activation) -> None:
        """Record that something reads these activations and is not linear in them."""
        for activation in activations:
            self.ledger.mark_nonlinear(collapse(activation.unit))

    def merge_to_shape(self, labels: Tensor, shape: torch.Size) -> Tensor:
        """Return labels of a shape that is broadcast to the given ones' shape.

        The labels must be constant along the axes of the broadcast, which this requires.
        """
        lead = labels.ndim - len(shape)
        dims = [d for d in range(labels.ndim) if d < lead or shape[d - lead] == 1]
        if dims:
            labels = self.scales.merge(labels, dims)
        if lead:
            labels = labels.reshape(labels.shape[lead:])
        return labels


def _substitute(arguments: Any, values: dict[Node, Any]) -> Any:
    """Return a node's arguments with values in place of nodes."""
    return map_arg(arguments, lambda node: values[node])


def operation_name(node: Node) -> str:
    """Return the name of the operation that a node calls, such as "add"."""
    return str(getattr(node.target, "_opname", node.target))


def get_operation(node: Node) -> Callable[..., Any]:
    """Return the function that a node calls."""
    assert callable(node.target)
    return node.target


def _has_several_results(node: Node) -> bool:
    """Return True if the operation returns a list or a tuple."""
    return isinstance(node.meta.get("val"), (list, tuple))


def list_shapes(node: Node) -> list[tuple[int, ...]]:
    """Return the shapes of all results of an operation; () where one is no tensor."""
    results: Any = node.meta.get("val")
    if not _has_several_results(node):
        results = [results]
    return [tuple(getattr(result, "shape", ())) for result in results]


def label_results(node: Node, scale: Tensor) -> Any:
    """Return every result of an operation with one label."""
    activations = [Activation.expand(scale, shape) for shape in list_shapes(node)]
    if _has_several_results(node):
        return activations
    return activations[0]


def add_constants(node: Node, first: Activation) -> Any:
    """Return the results of an operation: the first as given, and constants for all others."""
    if not _has_several_results(node):
        return first
    return [first, *(Activation.constant(shape) for shape in list_shapes(node)[1:])]
