"""The layers met in one forward pass: their inputs and where their output cotangents appear.

There is one record for all its readers: exact rows and tangent kernels (`structure.py`), roles of
parameters (`roles.py`) and K-FAC's statistics. A `RecordedPass` pulls covectors back through it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .._core.capture import Call, detach_tensors
from .._core.errors import PullbackError
from .._core.graph import Root, collect_reachable_nodes, pull_back
from . import uses  # noqa: F401  (what is noted of each function)
from .functions import FunctionMode
from .layers import Compound, Layer, find_layer
from .layers.compound import list_tensors
from .layers.scale import Normalization
from .output_parts import OutputParts

_HALF = (torch.float16, torch.bfloat16)
_BATCH_NORM_NODES = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
_SAVED_INPUTS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_PACKING = getattr(_AUTOGRAD, "_top_saved_tensors_default_hooks", None)


@dataclass(slots=True, frozen=True, eq=False)
class Site:
    """A layer with its parameters: what the uses of the layer have in common."""

    path: str
    module: nn.Module
    layer: Layer
    names: dict[str, str | None]
    #: references to these parameters, so that no other tensor gets the `id` of one of them
    parameters: tuple[Tensor | None, ...]
    #: what distinguishes the site from others: its path, its layer and the names
    mark: tuple[Any, ...]
    #: whether the module represents a function that was called
    is_function: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """One use of one layer."""

    site: Site
    input: Tensor
    edge: GradientEdge
    shape: tuple[int, ...]
    #: mean and 1/σ of a batch normalization, where the graph keeps them
    normalization: Normalization | None = None
    #: the module's name in the model
    path: str = field(init=False)
    #: whose use it is
    module: nn.Module = field(init=False)
    #: what is known of such modules
    layer: Layer = field(init=False)
    #: the parameters that take part, by role
    names: dict[str, str | None] = field(init=False)
    #: trailing axes of the output that belong to one position
    features: int = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.site.path
        self.module = self.site.module
        self.layer = self.site.layer
        self.names = self.site.names
        self.features = self.layer.count_feature_axes(self.module, len(self.shape))

    @property
    def key(self) -> tuple[Any, ...]:
        """The layer and its parameters: uses with the same key share one block of rows."""
        return (self.layer, *self.names.values())

    def restrict(self, leaves: Collection[str]) -> bool:
        """Take the parameters that are not among these for frozen; return True if one is left."""
        names = {role: name if name in leaves else None for role, name in self.names.items()}
        if names != self.names:
            mark = (self.path, self.layer, *names.items())
            self.site = replace(self.site, names=names, mark=mark)
            self.names = names
        return any(names.values())


def find_output_edge(output: Tensor) -> GradientEdge:
    """Return the edge at which the cotangent of a computed tensor appears.

    It is `get_gradient_edge`, in fewer steps.
    """
    node = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # which does not own its graph
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def find_factor_layer(module: nn.Module) -> Layer | Compound | None:
    """Return the layer of a module that gives Kronecker factors, or the compound that it is."""
    layer = find_layer(module, Compound) or find_layer(module)
    if layer is None or layer.curvature == "rows":
        return None
    return layer


class WatchedLayer(NamedTuple):
    """A module whose calls are recorded."""

    path: str
    module: nn.Module
    layer: Layer | Compound


class ModelLayers:
    """The modules of a model whose calls are recorded, found once for many forward passes.

    Args:
        model: whose modules they are.
        find: the layer of a module, None for a module that is not recorded: `find_layer` for rows
            of J, where compound layers show the functions that they call, or `find_factor_layer`.
    """

    def __init__(
        self, model: nn.Module, find: Callable[[nn.Module], Layer | Compound | None]
    ) -> None:
        self.modules = dict(model.named_modules())
        self._structure = [(m, type(m), dict(m._modules)) for m in self.modules.values()]
        watched = []
        for path, module in self.modules.items():
            layer = find(module)
            if layer is not None:
                watched.append(WatchedLayer(path, module, layer))
        #: the record of the pass under way; its hooks refer to no module
        self.active: list[ForwardRecord] = []
        self.hooks = [(each.module, _make_hook(each, self.active)) for each in watched]
        self._leaves: Mapping[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._known: dict[tuple[Any, ...], Site] = {}
        #: whether functions are listened to: not after a pass in which modules showed every use
        self.is_listening = True

    @property
    def is_current(self) -> bool:
        """Return True if the model still has the same modules, of the same types."""
        for module, module_type, children in self._structure:
            if type(module) is not module_type or module._modules != children:
                return False
        return True

    def name_leaves(self, leaves: Mapping[str, Tensor]) -> dict[int, str]:
        """Return the names of these parameters by `id`.

        Another mapping than in the last call empties the cache of sites.
        """
        if leaves is not self._leaves:
            self._leaves = leaves
            self._known = {}
            self._names = {id(leaf): name for name, leaf in leaves.items()}
        return self._names

    def find_site(self, path: str, module: nn.Module, layer: Layer) -> Site | None:
        """Return a layer with its present parameters; None if none of them takes part."""
        parameters = layer.parameters(module)
        key = (path, *map(id, parameters.values()))
        if key not in self._known:
            site = self._make_site(path, module, layer, parameters)
            if not any(site.names.values()):
                return None
            self._known[key] = site
        return self._known[key]

    def find_function_site(self, key: Any, make: Callable[[], nn.Module]) -> Site:
        """Return the site of the module that represents a function, with its parameters."""
        if key is not None and key in self._known:
            return self._known[key]
        module = make()
        layer = find_layer(module)
        site = self._make_site(None, module, layer, layer.parameters(module))
        if key is not None:
            self._known[key] = site
        return site

    def _make_site(
        self,
        path: str | None,
        module: nn.Module,
        layer: Layer,
        parameters: Mapping[str, Tensor | None],
    ) -> Site:
        """Return a new site; one without a path is that of a function.

        It gets the name of its first parameter as its path.
        """
        names = {role: self._names.get(id(tensor)) for role, tensor in parameters.items()}
        is_function = path is None
        if path is None:
            path = next(name for name in names.values() if name is not None)
        mark = (path, layer, *names.items())
        tensors = tuple(parameters.values())
        return Site(path, module, layer, names, tensors, mark, is_function)


def _make_hook(watched: WatchedLayer, active: list[ForwardRecord]) -> Callable[..., Any]:
    """Return the forward hook that gives a module's calls to the record of the pass under way."""
    path = watched.path
    layer: Any = watched.layer

    def record_compound(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not active or not torch.is_grad_enabled():
            return None
        return active[0].add_compound_call(path, module, layer, (args, kwargs), output)

    def record_use(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if args:
            x = args[0]
        else:
            x = next(iter(kwargs.values()), None)
        if not isinstance(output, Tensor) or not isinstance(x, Tensor):
            return None
        if not active or not output.requires_grad:
            return None
        return active[0].add_module_use(path, module, layer, x, output)

    if isinstance(layer, Compound):
        return record_compound
    return record_use


@dataclass(frozen=True)
class CompoundCall:
    """One call of a compound layer: its arguments, and where its outputs' cotangents appear."""

    path: str
    module: nn.Module
    compound: Compound
    args: Any
    kwargs: dict[str, Any]
    edges: list[GradientEdge | None]
    #: what its replay leaves out, in words; empty if it leaves out nothing
    omission: str
    #: where its arguments stand in the graph, if the replay leaves something out
    argument_edges: list[GradientEdge]


class ForwardRecord:
    """A context in which every use of a trainable parameter by a known layer is written down.

    Modules of known kinds show their uses by hooks, all others by the functions that they call.
    Natural gradients, kernels, K-FAC and the roles of parameters read this record.

    The output is remembered as a gradient edge and not as a tensor: an activation that
    works in place changes the tensor, but not the edge.

    Args:
        layers: the modules to be recorded.
        leaves: the parameters that take part, by name.
    """

    def __init__(self, layers: ModelLayers, leaves: Mapping[str, Tensor]) -> None:
        self.layers = layers
        self.entries: list[Entry] = []
        self.compounds: list[CompoundCall] = []
        #: how many nodes the pass added to the graph: it shows what is done outside of layers
        self.node_count = 0
        #: the linear layer that gave a large output
        self.head: int | None = None
        self._names = layers.name_leaves(leaves)
        self._hook_id = -1
        self._mode: FunctionMode | None = None
        #: follows the outputs of weights, where somebody asks how they are split
        self.outputs: OutputParts | None = None
        #: nodes of the outputs of layers whose parameters do not take part, if outputs are followed
        self.untrained_nodes: list[Any] = []
        #: for how many samples outputs of shared embeddings are repeated; 0 leaves them as they are
        self.repeat_count = 0
        #: nodes of the outputs that were repeated
        self.repeated_nodes: set[Any] = set()

    def follow_outputs(self) -> None:
        """Let the pass show how outputs of weights are split; call it before the pass."""
        self.layers.is_listening = True
        self.outputs = OutputParts(self._names)

    def stop_following(self) -> None:
        """Let go of what `follow_outputs` holds of the graph."""
        self.outputs = None
        self.untrained_nodes = []

    def __enter__(self) -> ForwardRecord:
        # as `register_forward_hook` does it, with one number for all instead of a handle each
        self._hook_id = RemovableHandle(OrderedDict()).id
        self.layers.active[:] = [self]
        for module, hook in self.layers.hooks:
            hooks: Any = module._forward_hooks
            hooks[self._hook_id] = hook
            hooks.move_to_end(self._hook_id, last=False)  # first of all
            module._forward_hooks_with_kwargs[self._hook_id] = True
        if self.layers.is_listening:
            self._mode = FunctionMode(self)
            self._mode.__enter__()
        if self.outputs is not None:
            self.outputs.__enter__()
        self.node_count = -_AUTOGRAD._get_sequence_nr()
        return self

    def __exit__(self, *exc: object) -> None:
        self.node_count += _AUTOGRAD._get_sequence_nr()
        if self.outputs is not None:
            self.outputs.__exit__(*exc)
        if self._mode is not None:
            self._mode.__exit__(*exc)
            self._mode = None
            self.layers.is_listening = any(e.site.is_function for e in self.entries)
        self.layers.active.clear()
        for module, _ in self.layers.hooks:
            module._forward_hooks.pop(self._hook_id, None)
            module._forward_hooks_with_kwargs.pop(self._hook_id, None)

    # --- what hooks and functions show ----------------------------------------------------------

    def add_module_use(
        self, path: str, module: nn.Module, layer: Layer, x: Tensor, output: Tensor
    ) -> Tensor | None:
        """Record a module's use of its parameters; return the output that replaces the module's.

        None leaves the module's output in place.
        """
        if _is_complex(x, output):
            return None
        site = self.layers.find_site(path, module, layer)
        if site is None:
            if self.outputs is not None and layer.curvature == "kronecker":
                self.untrained_nodes.append(output.grad_fn)
            return None
        if self._function_used_more(site, output):
            return None
        is_built_in = type(layer).__module__.startswith(__package__ or "")
        if is_built_in:  # such a layer calls one function
            self._forget_functions(site.names.values(), 1)
        else:
            self._forget_functions(site.names.values())
        return self._add_use(site, x, output)

    def _function_used_more(self, site: Site, output: Tensor) -> bool:
        """Return True if the last recorded function gave the output, and used more parameters.

        These are the ones from which the module's weight was computed.
        """
        if not self.entries or output.grad_fn is None:
            return False
        last = self.entries[-1]
        if not last.site.is_function or last.edge.node is not output.grad_fn:
            return False
        return {*filter(None, last.names.values())} > {*filter(None, site.names.values())}

    def add_function_use(
        self, key: Any, make: Callable[[], nn.Module], x: Tensor, output: Tensor
    ) -> Tensor:
        """Record a function's use of parameters, as one of the module that represents it.

        Returns:
            The output that replaces the function's.
        """
        if _is_complex(x, output):
            return output
        return self._add_use(self.layers.find_function_site(key, make), x, output)

    def _add_use(self, site: Site, x: Tensor, output: Tensor) -> Tensor:
        """Append an entry; return the output to go on with, whose edge is the entry's.

        It is a copy where the output is a view, and repeated by sample for a shared embedding.
        """
        if x.is_nested or output.is_nested:
            raise PullbackError(
                f"The layer of {site.path!r} received a nested tensor",
                "inputs and cotangents of a layer are read along dense axes",
                "Pad it, x.to_padded_tensor(0.0), and leave padded positions out of the loss, or "
                "do not give the layer's parameters to the optimizer",
            )
        has_shared_input = self.repeat_count > 0 and _is_shared_embedding(
            site.module, x, self.repeat_count
        )
        if has_shared_input:
            x = _repeat_for_samples(x, self.repeat_count, 0)
            output = _repeat_for_samples(output, self.repeat_count, 1)
        if output._is_view():  # an in-place activation would replace a view's node
            output = output.clone()
        if has_shared_input:
            self.repeated_nodes.add(output.grad_fn)
        normalization = None
        if site.layer.curvature == "units":
            normalization = _read_normalization(output)
            x = x.detach()
        else:
            x = _read_used_input(x, output)
        self.entries.append(Entry(site, x, find_output_edge(output), output.shape, normalization))
        if self.outputs is not None:
            self.outputs.follow_output(site.names.get("weight"), site.module, output)
        return output

    def add_compound_call(
        self, path: str, module: nn.Module, compound: Any, arguments: tuple[Any, Any], output: Any
    ) -> Any:
        """Record a call of a compound layer; return the output that replaces the layer's."""
        self._forget_functions({self.name(p) for p in module.parameters()})
        output = _separate(output, compound.select_outputs(module, output))
        call = _record_call(path, module, compound, arguments, output)
        if call is not None:
            self.compounds.append(call)
        return output

    def _forget_functions(self, names: Collection[str | None], count: int | None = None) -> None:
        """Remove the last uses by functions, of these parameters alone: a module shows them.

        At most `count` of them are removed; None stands for all.
        """
        if count is None:
            remaining = len(self.entries)
        else:
            remaining = count
        while remaining and self.entries and self.entries[-1].site.is_function:
            if not {*self.entries[-1].names.values()} <= {*names, None}:
                return
            self.entries.pop()
            remaining -= 1

    def restrict(self, leaves: Mapping[str, Tensor]) -> None:
        """Let only these of the parameters take part, and remove the uses of others."""
        self._names = self.layers.name_leaves(leaves)
        self.entries = [entry for entry in self.entries if entry.restrict(leaves)]

    # --- parameters and the model ---------------------------------------------------------------

    def is_parameter(self, t: Tensor) -> bool:
        """Return True if the tensor is a parameter that takes part."""
        return id(t) in self._names

    def name(self, parameter: Tensor | None) -> str | None:
        """Return the name of a parameter that takes part; None for other tensors."""
        if parameter is None:
            return None
        return self._names.get(id(parameter))

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple([module.training for module in self.layers.modules.values()])

    def signature(self, call: Call) -> Any:
        """Return a key of what the structure depends on: parameters, layers, shapes and modes."""
        layers = tuple(
            (e.path, e.shape, tuple(e.input.shape), e.module.training) for e in self.entries
        )
        inputs = tuple((tuple(t.shape), t.dtype) for t in call.tensors)
        names = tuple(self._names.values())
        return names, layers, inputs, call.autocast, torch.get_default_dtype()

    # --- the graph ------------------------------------------------------------------------------

    def release(self, output_node: Any) -> None:
        """Drop the references to the node of the model's output; `edges` gets it again."""
        empty: Any = None
        for entry in self.entries:
            if entry.edge.node is output_node:
                entry.edge = GradientEdge(empty, entry.edge.output_nr)
        for call in self.compounds:
            for i, edge in enumerate(call.edges):
                if edge is not None and edge.node is output_node:
                    call.edges[i] = GradientEdge(empty, edge.output_nr)
            edges = call.argument_edges
            edges[:] = [edge for edge in edges if edge.node is not output_node]

    def edges(self, output_node: Any) -> list[GradientEdge]:
        """Return the edges of the layers' outputs, then those of compound layers' outputs.

        `output_node` is the one that `release` dropped, None if it was not called.
        """
        edges = [entry.edge for entry in self.entries]
        for call in self.compounds:
            edges.extend(edge for edge in call.edges if edge is not None)
        for i, edge in enumerate(edges):
            if edge.node is None:
                edges[i] = GradientEdge(output_node, edge.output_nr)
        return edges

    def note_head(self, node: Any) -> bool:
        """Note as `head` the plain linear layer with this output node; return True if there is one.

        It is called before the node is released.
        """
        for i, entry in enumerate(self.entries):
            if type(entry.module) is nn.Linear and entry.edge.node is node:
                self.head = i
        return self.head is not None

    def head_output(self, dtype: torch.dtype) -> Tensor:
        """Compute the output of the head again, and return it: logits take much memory if kept."""
        assert self.head is not None
        entry = self.entries[self.head]
        parameters: Any = entry.module._parameters
        bias = parameters["bias"]
        if bias is not None:
            bias = bias.detach().to(dtype)
        with torch.autocast(entry.input.device.type, enabled=False):
            return F.linear(entry.input.to(dtype), parameters["weight"].detach().to(dtype), bias)


@dataclass
class RecordedPass:
    """A recorded forward pass with its graph, through which covectors are pulled back."""

    #: where the output stands in the graph
    root: Root
    record: ForwardRecord
    #: the parameters that take part, by name
    leaves: Mapping[str, Tensor]

    @cached_property
    def edges(self) -> list[GradientEdge]:
        """The edges at which cotangents appear: of all uses, then of compound layers' outputs."""
        if isinstance(self.root, Tensor):
            return self.record.edges(None)
        return self.record.edges(self.root.node)

    @property
    def compound_edges(self) -> list[GradientEdge]:
        """The edges of compound layers' outputs."""
        return self.edges[len(self.record.entries) :]

    def pull(
        self,
        covector: Tensor,
        targets: Sequence[GradientEdge | Tensor],
        use_numbers: Iterable[int],
        observe: Callable[[int, Tensor], None],
    ) -> list[Tensor | None]:
        """Return the covector pulled back to the targets, None at those that it does not reach.

        On the way `observe` gets the number of each of these uses that the covector reaches, with
        the cotangent there. The pass itself keeps none of these cotangents.
        """

        def before(i: int, number: int, cotangents: Sequence[Tensor | None]) -> None:
            if (delta := cotangents[number]) is not None:
                observe(i, delta)

        handles = []
        for i in use_numbers:
            edge = self.edges[i]
            handles.append(edge.node.register_prehook(partial(before, i, edge.output_nr)))
        try:
            return list(pull_back(self.root, covector, targets))
        finally:
            for handle in handles:
                handle.remove()


def _record_call(
    path: str, module: nn.Module, compound: Compound, arguments: tuple[Any, Any], output: Any
) -> CompoundCall | None:
    """Return the record of a compound layer's call; None if no output has a graph."""
    edges: list[GradientEdge | None] = []
    for tensor in compound.select_outputs(module, output):
        if tensor.requires_grad:
            edges.append(find_output_edge(tensor))
        else:
            edges.append(None)
    if all(edge is None for edge in edges):
        return None
    omission = compound.describe_omission(module)
    argument_edges = []
    if omission:
        argument_edges = [find_output_edge(t) for t in list_tensors(arguments) if t.requires_grad]
    args, kwargs = (detach_tensors(tree) for tree in arguments)
    return CompoundCall(path, module, compound, args, kwargs, edges, omission, argument_edges)


def _separate(output: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a layer's output with copies of the tensors from which others of it are computed.

    A cotangent at such a copy comes only from outside of the layer: an LSTM cell's h is computed
    from its c, for instance.
    """
    nodes: set[Any] = {t.grad_fn for t in tensors} - {None}
    inner = {node for node in nodes if _is_reached(node, nodes - {node})}

    def copy_inner(tensor: Tensor) -> Tensor:
        if tensor.grad_fn in inner:
            return tensor.clone()
        return tensor

    return pytree.tree_map_only(Tensor, copy_inner, output)


def _is_reached(node: Any, others: Collection[Any]) -> bool:
    """Return True if the node lies below one of the others in the graph."""
    first = node._sequence_nr()

    def list_later_nodes(node: Any) -> list[Any]:
        below = [n for n, _ in node.next_functions if n is not None]
        return [n for n in below if n._sequence_nr() >= first]

    return any(node in collect_reachable_nodes(other, list_later_nodes) for other in others)


def _read_used_input(x: Tensor, output: Tensor) -> Tensor:
    """Return a layer's input, in half precision if its output is.

    Autocast's copy of the input is reused if the graph saves it.
    """
    dtype = output.dtype
    x = x.detach()
    if dtype not in _HALF or x.dtype == dtype or not x.is_floating_point():
        return x
    saved = None
    if not _has_packed_tensors():
        saved = _find_saved_input(output.grad_fn)
    if saved is None or saved.dtype != dtype or saved.numel() != x.numel():
        return x.to(dtype)
    if not saved.is_contiguous():
        return x.to(dtype)
    return saved.detach().view(x.shape)


def _find_saved_input(node: Any) -> Tensor | None:
    """Return the input that a matrix product saves; None if there is no product at the node.

    The product may lie below a view and a copy of its result.
    """
    for _ in range(3):
        if node is None:
            return None
        if node.name() in _SAVED_INPUTS:
            return getattr(node, _SAVED_INPUTS[node.name()])
        if not node.next_functions:
            return None
        node = node.next_functions[0][0]
    return None


def _read_normalization(output: Tensor) -> Normalization | None:
    """Return mean and 1/σ of the batch, which a normalization saves for its backward pass."""
    node: Any = output.grad_fn
    if node is None or node.name() not in _BATCH_NORM_NODES or _has_packed_tensors():
        return None
    mean = node._saved_result1.detach()
    scale = node._saved_result2.detach()
    if mean.numel() == scale.numel() == output.shape[1]:
        return Normalization(mean, scale)
    return None


def _has_packed_tensors() -> bool:
    """Return True if saved tensors are packed, as by checkpoints: they unpack only once."""
    return _PACKING is None or _PACKING(True) is not None


def _is_complex(x: Tensor, output: Tensor) -> bool:
    """Return True for a use among complex numbers, where the formulas of layers do not hold."""
    return x.is_complex() or output.is_complex()


def _is_shared_embedding(module: nn.Module, indices: Tensor, samples: int) -> bool:
    """Return True if an embedding looks up indices (T,) or (1, T) for a batch of other size."""
    if not isinstance(module, nn.Embedding) or samples < 2:
        return False
    if indices.ndim == 1:
        return indices.shape[0] != samples
    return indices.ndim == 2 and indices.shape[0] == 1


def _repeat_for_samples(tensor: Tensor, samples: int, features: int) -> Tensor:
    """Return a tensor (T, ...) or (1, T, ...) as (N, T, ...); `features` axes follow T.

    A tensor that was repeated stays as it is: a module's output comes from a function that was
    recorded before.
    """
    if tensor.ndim == 2 + features and tensor.shape[0] == samples:
        return tensor
    if tensor.ndim == 1 + features:
        tensor = tensor.unsqueeze(0)
    return tensor.expand(samples, *tensor.shape[1:])
