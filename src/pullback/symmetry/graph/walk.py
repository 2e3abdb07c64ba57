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

from ..actions.charts import Chart, FixedNorm, ParameterView
from .ledger import NONE, Act, Ledger, Ref, Value, read_matrix
from .scales import FIXED, Scales, collapse, equate_uses
from .tracing import Example

Rule = Callable[["Walk", Node, list[Any], dict[str, Any]], Any]

#: what to do with an operation, by its name (`aten` packet)
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, also for their in-place forms."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = RULES[name + "_"] = function
        return function

    return register


@dataclass
class ParameterRegion:
    """A part of a parameter: how each entry is scaled, as a sum of arrays of labels."""

    mask: Tensor
    legs: dict[tuple[int, ...], Tensor]


@dataclass
class Walk:
    """The state of a walk.

    Attributes:
        scales: the equations between log-scales.
        ledger: linear layers, and who reads their outputs.
        held: the parameters that were met, by name.
        notes: what was given up, and why.
        folds: batch norms with fixed statistics, and the labels (C,) of what they read.
        matrices: weights and biases held in another shape, or used times a number, by the names
            that stand for them.
        constants: what is behind the graph's placeholders, if it is no parameter and no input.
    """

    scales: Scales = field(default_factory=Scales)
    ledger: Ledger = field(default_factory=Ledger)
    held: dict[str, list[ParameterRegion]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    folds: list[tuple[FixedNorm, Tensor]] = field(default_factory=list)
    matrices: dict[str, Chart] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    _axes: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def run(self, graph: Graph, example: Example) -> None:
        """Walk the graph of an example's call; outputs are fixed."""
        values: dict[Node, Any] = {}
        remaining = {n: len(n.users) for n in graph.nodes}
        names, constants = iter(example.params), iter(example.fixed.values())
        for node in graph.nodes:
            if node.op == "placeholder" and (name := next(names, None)) is not None:
                values[node] = Ref.whole(name, shapes(node)[0])
            elif node.op in ("placeholder", "get_attr"):
                values[node] = Act.constant(shapes(node)[0])
                if (constant := next(constants, None)) is not None:
                    self.constants[node.name] = constant
            elif node.op == "output":
                for out in _filled(node.args, values)[0]:
                    if isinstance(out, (Act, Ref)):
                        act = self.act(out)
                        self.touch(act)
                        self.scales.fix(act.scale)
            else:
                values[node] = self._call(node, values)
            for used in node.all_input_nodes:  # free what nobody reads any more
                remaining[used] -= 1
                if not remaining[used]:
                    values.pop(used, None)

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        args, kwargs = _filled(node.args, values), _filled(node.kwargs, values)
        if node.target is operator.getitem:
            found = args[0]
            return found[args[1]] if isinstance(found, (list, tuple)) else found
        name = str(getattr(node.target, "_opname", node.target))
        if name == "copy_":
            return args[1]
        known = RULES.get(name)
        if known is not None:
            out = known(self, node, list(args), dict(kwargs))
            if out is not NotImplemented:
                return out
        return self.give_up(node, args, kwargs)

    def give_up(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Fix the scales of all inputs and outputs of an operation without a rule."""
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, (Act, Ref)):
                act = self.act(value, fixed=True)
                self.touch(act)
                self.scales.fix(act.scale)
        return result(node, torch.tensor(FIXED))

    # --- parameters ------------------------------------------------------------------------

    def hold(self, ref: Ref, *labels: Tensor) -> None:
        """The view's entries are scaled by the sum of these labels (broadcast to the view)."""
        legs: dict[tuple[int, ...], Tensor] = {}
        for label in labels:
            array = ref.placed(label)
            key = tuple(array.shape)
            legs[key] = self.scales.product(legs[key], array) if key in legs else array
        mask = ref.region()
        regions = self.held.setdefault(ref.name, [])
        for region in regions:
            if bool((region.mask & mask).any()):
                if bool((region.mask == mask).all()):
                    region.legs = equate_uses(self.scales, region.legs, legs)
                else:  # views that overlap in part
                    for array in (*legs.values(), *region.legs.values()):
                        self.scales.fix(array)
                return
        regions.append(ParameterRegion(mask, legs))

    def act(self, value: Value, *, fixed: bool = False) -> Act:
        """A parameter as an activation: with scales of its own, or fixed."""
        if isinstance(value, Act):
            return value
        coords = torch.broadcast_tensors(*[collapse(c) for c in value.coords]) or (torch.zeros(()),)
        small = coords[0].shape
        if fixed or small.numel() > 2**16:
            label = torch.tensor(FIXED)
        else:
            label = self.scales.fresh(small.numel(), self.ledger.call()).view(small)
        self.hold(value, label.expand(value.view))
        return Act.of(label, value.view)

    def matrix(self, weight: Ref) -> tuple[str, Tensor, Tensor] | None:
        """A name for the matrix that a view (in, out) is in, its rows and columns there.

        None where axes of the parameter are mixed, or it was read with others before.
        """
        found = read_matrix(weight)
        if found is None:
            return None
        view, rows, columns = found
        if self._axes.setdefault(weight.name, view.axes) != view.axes:
            return None
        plain = ParameterView(weight.name, ((0,), (1,)))
        return self._named(view, plain), rows, columns

    def vector(self, bias: Ref) -> str:
        """A name for the vector of all entries of a parameter, as they are used."""
        view = ParameterView(bias.name, (tuple(range(len(bias.sizes))),), (), bias.factor)
        return self._named(view, ParameterView(bias.name, ((0,),)))

    def _named(self, view: ParameterView, whole: ParameterView) -> str:
        """A name for the view; the parameter's own where it is the whole as it stands."""
        if view == whole:
            return view.name
        name = f"{view.name}, axes {view.axes} at {view.at}, times {view.factor}"
        self.matrices[name] = view
        return name

    # --- activations -----------------------------------------------------------------------

    def touch(self, *acts: Act) -> None:
        """These outputs of linear layers are read by something that is not linear in them."""
        for act in acts:
            self.ledger.touch(collapse(act.unit))

    def reduced(self, labels: Tensor, shape: torch.Size) -> Tensor:
        """Labels merged to a shape that broadcasts to theirs."""
        lead = labels.ndim - len(shape)
        dims = [d for d in range(labels.ndim) if d < lead or shape[d - lead] == 1]
        merged = self.scales.merge(labels, dims) if dims else labels
        return merged.reshape(merged.shape[lead:]) if lead else merged


def _filled(tree: Any, values: dict[Node, Any]) -> Any:
    return map_arg(tree, lambda n: values[n])


def shapes(node: Node) -> list[tuple[int, ...]]:
    """The shapes of all results of an operation; () where one is no tensor."""
    value: Any = node.meta.get("val")
    many = value if isinstance(value, (list, tuple)) else [value]
    return [tuple(v.shape) if isinstance(v, Tensor) else () for v in many]


def result(node: Node, scale: Tensor) -> Any:
    """One label for every result of an operation."""
    value = node.meta.get("val")
    acts = [Act.of(scale, shape, torch.tensor(NONE)) for shape in shapes(node)]
    return acts if isinstance(value, (list, tuple)) else acts[0]


def with_constants(node: Node, first: Act) -> Any:
    """The results of an operation, of which all but the first are constants."""
    more = [Act.constant(shape) for shape in shapes(node)[1:]]
    return [first, *more] if isinstance(node.meta["val"], (list, tuple)) else first
