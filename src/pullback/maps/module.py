"""Any `nn.Module` as a map, through functional calls.

A plan says which axis counts the samples of each layer and which parameters the layers explain. It
depends on the operations of a forward pass and their connections, not on the numbers in them. So
plans are cached, and one call's plan serves another whose autograd graph has the same nodes and
edges over the same parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .._core.capture import Call, Selector, move_samples_first, select_output, unwrap_model
from .._core.errors import PullbackError, reraise_fatal
from .._core.factor import Factor
from .._core.graph import collect_reachable_nodes, disable_fused_attention
from .._core.products import full_precision
from .._core.space import ParameterSpace, relative_tolerance
from .base import Linearization, Map, Pulled
from .layers import find_layer
from .record import ForwardRecord, ModelLayers
from .structure import LayerStructure


class ModuleMap(Map):
    """w ↦ model(*args, **kwargs) for a recorded call, over a subset of the parameters.

    Args:
        model: any module; behind `torch.compile` the module itself is differentiated.
        call: the arguments (`Call.of(x)` for plain inputs), with random state and autocast
            mode where they were recorded.
        output: which tensor of a structured output is z.
        batch_dim: the axis of z that counts samples.
        plans: a cache of what was established about the model's structure, for later
            linearizations.
        coupled: accept modules that mix the samples of a batch, which have no rows per sample.
        layers: those of the model, where they were found before.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        *,
        output: Selector = None,
        batch_dim: int = 0,
        plans: dict[Any, Any] | None = None,
        coupled: bool = False,
        layers: ModelLayers | None = None,
    ) -> None:
        self.model = unwrap_model(model)
        self.call = call
        self.output = output
        self.batch_dim = batch_dim
        self.layers = layers
        self.plans: dict[Any, Any] = {}
        if plans is not None:
            self.plans = plans
        if not coupled:
            refuse_coupled(self.model)

    def value(self, output: Any) -> Tensor:
        """Return z from the model's output: samples first, at least one event axis."""
        return self.arrange(select_output(output, self.output))

    def arrange(self, z: Tensor) -> Tensor:
        """Return the selected tensor, or its cotangent, with samples first and an event axis."""
        return move_samples_first(z, self.batch_dim)

    def call_with(self, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return z at other parameters; buffers have the values of the call and stay unchanged."""
        buffers = self.call.buffers
        if buffers is None:
            buffers = dict(self.model.named_buffers())
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        tensors = fill_all_slots(self.model, {**copies, **params})
        return self.value(
            functional_call(self.model, tensors, args, kwargs, tie_weights=False, strict=False)
        )

    def linearize(self, params: Mapping[str, Tensor]) -> ModuleLinearization:
        """Return φ(w) with a graph that serves many pullbacks."""
        return ModuleLinearization(self, params)


class _Push(Enum):
    """How J v is computed."""

    FORWARD_MODE = "forward mode"
    DOUBLE_VJP = "double vjp"


class ModuleLinearization(Linearization):
    """A replayed forward pass with its layers' inputs and the positions where cotangents appear."""

    def __init__(self, source: ModuleMap, params: Mapping[str, Tensor]) -> None:
        self.map = source
        self.space = ParameterSpace(params)
        #: the parameters the graph is built on
        self.leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        shapes = tuple((tuple(t.shape), t.dtype) for t in source.call.tensors)
        self._record, self.graph = self._record_pass(shapes)
        #: the uses of known layers in the pass
        self.entries = self._record.entries
        self.value = self.graph.detach().to(self.space.dtype)
        self._refuse_another_output()

    def _record_pass(self, shapes: tuple[Any, ...]) -> tuple[ForwardRecord, Tensor]:
        """Return the layers of a pass and its output, with shared embeddings repeated by sample.

        Where repeating them would change the pass, it runs again without, now and from then on.
        """
        plans = self.map.plans
        sharing_key = ("shared embeddings", *shapes)
        if self.map.batch_dim == 0 and shapes and plans.get(sharing_key, True):
            samples = next(iter(shapes[0][0]), 0)
            try:
                record, graph = self._run_recorded(shapes, samples)
            except (RuntimeError, ValueError, IndexError) as error:
                reraise_fatal(error)
            else:
                if not record.repeated_nodes or self._is_unchanged(record, graph, sharing_key):
                    return record, graph
            plans[sharing_key] = False
        return self._run_recorded(shapes, 0)

    def _run_recorded(self, shapes: tuple[Any, ...], samples: int) -> tuple[ForwardRecord, Tensor]:
        """Return the layers of one pass and its output."""
        source = self.map
        call = source.call
        layers = source.layers
        if layers is None:
            layers = ModelLayers(source.model, find_layer)
        record = ForwardRecord(layers, self.leaves)
        record.repeat_count = samples
        listening_key = ("listening", *shapes)
        layers.is_listening = source.plans.get(listening_key, True)
        # proofs compare formulas with autograd, and TF32 would hide that they are right
        precision = full_precision(self.space.device, entries=0)
        with precision, torch.enable_grad(), call.replay_context(), record:
            graph = source.call_with(self.leaves, *call.args, **call.kwargs)
        source.plans[listening_key] = layers.is_listening
        return record, graph

    def _is_unchanged(self, record: ForwardRecord, graph: Tensor, sharing_key: Any) -> bool:
        """Return True if the pass with repeated embeddings is the model's own.

        The values are compared once per shape; the graph is looked at every time.
        """
        if not _are_added_to_samples(graph, record.repeated_nodes):
            return False
        if sharing_key not in self.map.plans:
            call = self.map.call
            precision = full_precision(self.space.device, entries=0)
            with precision, torch.no_grad(), call.replay_context():
                plain = self.map.call_with(self.leaves, *call.args, **call.kwargs)
            limit = relative_tolerance(graph.dtype, 10)
            is_same = plain.shape == graph.shape
            if not is_same or not bool((graph - plain).norm() <= limit * plain.norm()):
                return False
            self.map.plans[sharing_key] = True
        return True

    def _refuse_another_output(self) -> None:
        """Raise if the replayed pass gave another output than the recorded one."""
        recorded_output = self.map.call.recorded_output()
        if recorded_output is None:
            return
        recorded = self.map.arrange(recorded_output).to(self.value.dtype)
        is_same = recorded.shape == self.value.shape
        if is_same:
            limit = relative_tolerance(self.graph.dtype, 10)
            is_same = bool((self.value - recorded).norm() <= limit * recorded.norm())
        if is_same or not bool(torch.isfinite(recorded).all()):
            return
        raise PullbackError(
            "The forward pass cannot be repeated",
            "run again on the same inputs it gave another output: the model keeps a state or a "
            "random generator of its own, or the closure changed its mode (train, eval) after it",
            "Keep state in buffers, use torch's global random generator, and set the mode "
            "outside the closure",
        )

    def jvp(self, v: Tensor) -> Tensor:
        """Return J v by forward-mode differentiation, or by two reverse passes if that fails.

        Both are tested once per model and shape: an embedding's padding row, for instance, has a
        forward mode that its reverse mode does not share.
        """
        key = ("jvp", self._record.signature(self.map.call))
        if key not in self.map.plans:
            self.map.plans[key] = self._choose_push()
        if self.map.plans[key] is _Push.FORWARD_MODE:
            return self._push_forward(v)
        return self._push_by_double_vjp(v)

    def _choose_push(self) -> _Push:
        """Return the first method for J v that is adjoint to Jᵀu."""
        if self._is_adjoint(self._push_forward):
            return _Push.FORWARD_MODE
        if self._is_adjoint(self._push_by_double_vjp):
            return _Push.DOUBLE_VJP
        raise PullbackError(
            "J v cannot be computed for this model",
            "an operation in it has neither a forward-mode nor a second derivative",
            'Give the operation a jvp, or use gram="rows" or "kernel" with a solver that '
            "factorizes; in KFAC leave out Adaptive damping and step=",
        )

    def _is_adjoint(self, push: Callable[[Tensor], Tensor]) -> bool:
        """Return True if ⟨J v, u⟩ = ⟨v, Jᵀu⟩ for random u and v."""
        generator = torch.Generator().manual_seed(2)
        v, u = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.value)
            for shape in (self.space.size, self.value.shape)
        )
        try:
            pushed = push(v)
            pulled = self.vjp(u)
        except (RuntimeError, NotImplementedError) as error:
            reraise_fatal(error)
            return False
        scale = pushed.norm() * u.norm() + v.norm() * pulled.norm()
        gap = ((pushed * u).sum() - v @ pulled).abs()
        return bool(gap <= torch.finfo(self.graph.dtype).eps ** 0.5 * scale)

    def _push_forward(self, v: Tensor) -> Tensor:
        """Return J v by forward mode."""
        call = self.map.call
        source = self.map
        pieces = self.space.split(v)
        # fused attention has no forward mode, plain matrix products have
        with torch.no_grad(), fwad.dual_level(), call.replay_context(), disable_fused_attention():
            dual = {
                n: fwad.make_dual(p.detach(), pieces[n].to(p.dtype)) for n, p in self.leaves.items()
            }
            z = source.call_with(dual, *call.args, **call.kwargs)
            tangent = fwad.unpack_dual(z).tangent
        if tangent is None:
            return torch.zeros_like(self.value)
        return tangent.to(self.value.dtype)

    def _push_by_double_vjp(self, v: Tensor) -> Tensor:
        """Return J v as the derivative of u ↦ ⟨Jᵀu, v⟩."""
        z = self.graph
        pieces = self.space.split(v)
        u = torch.zeros_like(z, requires_grad=True)
        leaves = list(self.leaves.values())
        with torch.enable_grad():
            pulled = torch.autograd.grad(z, leaves, u, create_graph=True, allow_unused=True)
            pairs = zip(pulled, pieces.values(), strict=True)
            total = sum((p * piece.to(p.dtype)).sum() for p, piece in pairs if p is not None)
        if not isinstance(total, Tensor) or not total.requires_grad:
            return torch.zeros_like(self.value)
        return torch.autograd.grad(total, u, retain_graph=True)[0].to(self.value.dtype)

    def vjp(self, u: Tensor) -> Tensor:
        return self.space.flatten(self.gradients(u, list(self.leaves.values())))

    def closed_form(self, factor: Factor) -> Any:
        """Return `pullback_gram(linearization, factor)` of the model, None if it has none."""
        pullback_gram = getattr(self.map.model, "pullback_gram", None)
        if pullback_gram is None:
            return None
        return pullback_gram(self, factor)

    def gradients(
        self, u: Tensor, inputs: list[Any], *, batched: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Return autograd's gradients of ⟨u, z⟩ in parameters or layer outputs; the graph stays.

        `batched` covectors u (R, N, *event) are pulled back in one pass, by the rules of
        torch.func: those of `is_grads_batched` loop over covectors in many operations.
        """
        u = u.to(self.graph.dtype)
        if not batched:
            return torch.autograd.grad(self.graph, inputs, u, retain_graph=True, allow_unused=True)
        is_reached: list[bool] = []

        def pull(covector: Tensor) -> tuple[Tensor, ...]:
            gradients = torch.autograd.grad(
                self.graph, inputs, covector, retain_graph=True, allow_unused=True
            )
            is_reached[:] = [g is not None for g in gradients]
            return tuple(g for g in gradients if g is not None)  # vmap takes no None

        reached = iter(vmap(pull)(u))
        gradients: list[Tensor | None] = [None] * len(is_reached)
        for i, has_gradient in enumerate(is_reached):
            if has_gradient:
                gradients[i] = next(reached)
        return tuple(gradients)

    def pullback(self, covectors: Tensor) -> Pulled:
        """Return the rows, factored for layers with known structure, materialized elsewhere."""
        # proofs compare formulas with autograd, and TF32 would hide that they are right
        with full_precision(self.space.device, entries=0):
            return self._find_structure().pullback(self, covectors)

    def divide_pullback(self, covectors: Tensor, budget: int) -> list[Callable[[], Pulled]]:
        with full_precision(self.space.device, entries=0):
            structure = self._find_structure()
        groups = structure.divide_uses(self, len(covectors), budget)

        def pull_back(uses: Sequence[int], unexplained: Sequence[str]) -> Pulled:
            with full_precision(self.space.device, entries=0):
                return structure.pull_back_uses(self, covectors, uses, unexplained)

        parts = [partial(pull_back, uses, ()) for uses in groups[:-1]]
        return [*parts, partial(pull_back, groups[-1], structure.unexplained)]

    def _find_structure(self) -> LayerStructure:
        """Return what the layers explain: known from an earlier pass, or established now."""
        key = self._record.signature(self.map.call)
        structure = self.map.plans.get(key)
        if structure is None:
            structure = LayerStructure.establish(self)
            if structure.is_reusable:
                self.map.plans[key] = structure
        return structure

    @property
    def footprint(self) -> int:
        """Entries in memory, roughly, when one covector per sample is pulled back."""
        layer_parameters: set[str | None] = set()
        for entry in self.entries:
            layer_parameters.update(entry.names.values())
        row_entries = sum(p.numel() for n, p in self.leaves.items() if n not in layer_parameters)
        layer_entries = sum(prod(entry.shape) for entry in self.entries)
        return layer_entries + self.value.shape[0] * row_entries

    @property
    def largest_layer_cost(self) -> int:
        """Largest number of multiply-adds at one layer, when one covector per sample is pulled."""
        largest = 0
        for entry in self.entries:
            for weight in entry.layer.parameters(entry.module).values():
                if weight is not None:
                    largest = max(largest, prod(entry.shape) * prod(weight.shape[1:]))
        return largest


def fill_all_slots(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under all names of the parameters they replace, each module named once.

    torch's `tie_weights` names a module twice that is used twice, and then it restores the
    replacement instead of the parameter.
    """
    slots: dict[str, int] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                slots[prefix + key] = id(tensor)
    by_id = {slots[name]: tensor for name, tensor in tensors.items()}
    return {name: by_id[slot] for name, slot in slots.items() if slot in by_id}


def refuse_coupled(model: nn.Module) -> None:
    """Raise if a module mixes the samples of a batch."""
    for name, module in model.named_modules():
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if norm and (module.training or module.running_mean is None):
            raise PullbackError(
                f"{type(module).__name__} {name!r} couples the samples of a batch",
                "in training mode each output depends on all inputs, so there is no tangent "
                "vector per sample",
                "Call .eval() on it, freeze its statistics, or use GroupNorm or LayerNorm",
            )


_AXIS_ATTRIBUTES = ("_saved_dim", "_saved_dim0", "_saved_dim1", "_saved_dims")
#: graphs per model whose plans are cached: shapes of batches and modes differ, and a loop has few
#: of each. A plan that is not cached is established again, which takes two reverse passes.
_CACHED_GRAPHS = 64
_PLANS: WeakKeyDictionary[nn.Module, dict[Any, dict[Any, Any]]] = WeakKeyDictionary()


def shared_plans(linear: ModuleLinearization) -> dict[Any, Any] | None:
    """Return the cached plans for this graph; None if a parameter is used outside its layers.

    Such a use may vanish for the parameters of one call (a gate that begins at zero) and count for
    those of the next, so a plan holds for one call only.
    """
    topology = read_topology(linear.graph, linear.leaves)
    uses: Counter[str] = Counter()
    for entry in linear.entries:
        uses.update(name for name in entry.names.values() if name is not None)
    if any(topology.parameter_edges[name] != count for name, count in uses.items()):
        return None
    dtypes = tuple((p.dtype, p.device) for p in linear.leaves.values())
    plans_by_graph = _PLANS.setdefault(linear.map.model, {})
    if len(plans_by_graph) >= _CACHED_GRAPHS:
        plans_by_graph.clear()
    return plans_by_graph.setdefault((topology.nodes, dtypes), {})


@lru_cache(maxsize=1024)
def _list_axis_attributes(node_type: type) -> tuple[str, ...]:
    """Return the attributes under which nodes of a type save their axes."""
    return tuple(name for name in _AXIS_ATTRIBUTES if hasattr(node_type, name))


@dataclass(frozen=True)
class Topology:
    """An autograd graph without its numbers."""

    #: each node's name, axes, parameter and edges, in the order of a breadth-first walk
    nodes: tuple[Any, ...]
    #: how many edges lead to each parameter
    parameter_edges: Counter[str]


def read_topology(root: Tensor, leaves: dict[str, Tensor]) -> Topology:
    """Return the topology of the graph of `root` over these parameters."""
    names = {id(leaf): name for name, leaf in leaves.items()}
    queue = [root.grad_fn]
    index = {root.grad_fn: 0}
    nodes = []
    parameter_edges: Counter[str] = Counter()
    for node in queue:  # grows while it is walked
        if node is None:
            continue
        edges = []
        for next_node, output_number in node.next_functions:
            if next_node not in index:
                index[next_node] = len(queue)
                queue.append(next_node)
            edges.append((index[next_node], output_number))
            name = names.get(id(getattr(next_node, "variable", None)))
            if name is not None:
                parameter_edges[name] += 1
        axes = tuple([str(getattr(node, axis)) for axis in _list_axis_attributes(type(node))])
        name = names.get(id(getattr(node, "variable", None)))
        nodes.append((node.name(), axes, name, tuple(edges)))
    return Topology(tuple(nodes), parameter_edges)


def _are_added_to_samples(root: Tensor, shared: Collection[Any]) -> bool:
    """Return True if repeated outputs are used in sums with tensors of their own shape alone.

    There it makes no difference whether they are repeated. `shared` holds their graph nodes.
    """
    return all(_adds_to_samples(node, shared) for node in collect_reachable_nodes(root.grad_fn))


def _adds_to_samples(node: Any, shared: Collection[Any]) -> bool:
    """Return True if a node uses no repeated output, or adds one to another tensor of its shape."""
    repeated = []
    others = []
    for operand, output_number in node.next_functions:
        if operand in shared:
            repeated.append(operand)
        elif operand is not None:
            others.append(operand._input_metadata[output_number])
    if not repeated:
        return True
    if node.name() != "AddBackward0" or len(others) != 1:
        return False
    return list(others[0].shape) == list(repeated[0]._input_metadata[0].shape)
