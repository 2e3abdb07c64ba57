"""The layers met in one forward pass: their inputs and where their output cotangents appear."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from .._core.capture import Call, detach_tensors
from .._core.errors import PullbackError
from .._core.graph import collect_reachable_nodes
from . import uses  # noqa: F401  (what is noted of each function)
from .functions import FunctionMode
from .layers import Compound, Layer, find_layer
from .layers.compound import list_tensors
from .layers.scale import Normalization
from .output_parts import OutputParts

_HALF = (torch.float16, torch.bfloat16)
_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
_ROWS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_PACKING = getattr(_AUTOGRAD, "_top_saved_tensors_default_hooks", None)


@dataclass(slots=True, frozen=True, eq=False)
class Site:
    """A layer with the parameters that it held: what its uses have in common, found once."""

    path: str
    module: nn.Module
    layer: Layer
    names: dict[str, str | None]
    #: those parameters, so that no others get their place in memory
    held: tuple[Tensor | None, ...]
    #: what tells it from others
    mark: tuple[Any, ...]
    #: whether the module stands for a function that was called
    function: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """One use of one layer."""

    site: Site
    input: Tensor
    edge: GradientEdge
    shape: tuple[int, ...]
    #: mean and 1/σ of a batch normalization, where the graph keeps them
    normalization: Normalization | None = None

    @property
    def path(self) -> str:
        """The module's name in the model."""
        return self.site.path

    @property
    def module(self) -> nn.Module:
        """Whose use it is."""
        return self.site.module

    @property
    def layer(self) -> Layer:
        """What is known of such modules."""
        return self.site.layer

    @property
    def names(self) -> dict[str, str | None]:
        """The parameters that take part, by role."""
        return self.site.names

    @property
    def features(self) -> int:
        """Trailing axes of the output that belong to one place."""
        return self.layer.features(self.module, len(self.shape))

    @property
    def key(self) -> tuple[Any, ...]:
        """Which parameters, in which roles, by which kind of layer."""
        return (self.layer, *self.names.values())


def edge_of(output: Tensor) -> GradientEdge:
    """Where the cotangent of a computed tensor appears: `get_gradient_edge`, in fewer steps."""
    node = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # which does not own its graph
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


class Sites:
    """What is to be written down of a model's modules, found once: `by` a path, a module, its kind.

    Args:
        model: whose modules they are.
        kind: what is known of a module, None where it is of no interest.
    """

    def __init__(self, model: nn.Module, kind: Callable[[nn.Module], Any]) -> None:
        named = list(model.named_modules())
        kinds = [(path, module, kind(module)) for path, module in named]
        self.by = [site for site in kinds if site[2] is not None]
        self.modules = dict(named)
        self._held = [(m, type(m), dict(m._modules)) for _, m in named]
        self._leaves: Mapping[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._known: dict[tuple[Any, ...], Site] = {}
        #: hooks for the recorder that is in `now`
        self.hooks: list[tuple[nn.Module, Any]] = []
        self.now: list[Any] = []
        #: whether functions are listened to: not after a pass in which modules showed every use
        self.listening = True

    @property
    def current(self) -> bool:
        """Whether the modules are still the same."""
        return all([type(m) is kind and m._modules == below for m, kind, below in self._held])

    def names(self, leaves: Mapping[str, Tensor]) -> dict[int, str]:
        """The names of the parameters that take part from now on, by `id`."""
        if leaves is not self._leaves:
            self._leaves = leaves
            self._known = {}
            self._names = {id(leaf): name for name, leaf in leaves.items()}
        return self._names

    def site(self, path: str, module: nn.Module, layer: Layer) -> Site | None:
        """A layer with the parameters that it holds just now, None where none takes part."""
        place = (path, *map(id, layer.parameters(module).values()))
        if place not in self._known:
            found = self._site(path, module, layer)
            if not any(found.names.values()):
                return None
            self._known[place] = found
        return self._known[place]

    def function(self, key: Any, make: Callable[[], nn.Module]) -> Site:
        """The module that stands for a function, with the parameters that it uses."""
        if key is not None and key in self._known:
            return self._known[key]
        module = make()
        found = self._site(None, module, find_layer(module))
        if key is not None:
            self._known[key] = found
        return found

    def _site(self, path: str | None, module: nn.Module, layer: Layer) -> Site:
        held = layer.parameters(module)
        names = {r: self._names.get(id(t)) for r, t in held.items()}
        if path is None:
            at = next(n for n in names.values() if n is not None)
        else:
            at = path
        mark = (at, layer, *names.items())
        return Site(at, module, layer, names, (*held.values(),), mark, function=path is None)


class Recorder:
    """A context in which every use of a trainable parameter by a known layer is written down.

    Modules of known kinds show their uses by hooks, all others by the functions that they call.

    The output is remembered as a gradient edge and not as a tensor: an activation that
    works in place changes the tensor, but not the edge.
    """

    def __init__(
        self, model: nn.Module, leaves: Mapping[str, Tensor], sites: Sites | None = None
    ) -> None:
        self.entries: list[Entry] = []
        if sites is None:
            self.sites = Sites(model, self.kind)
        else:
            self.sites = sites
        self._names = self.sites.names(leaves)
        self._number = -1
        self._mode: FunctionMode | None = None
        #: follows the outputs of weights, where somebody asks how they are split
        self.outputs: OutputParts | None = None

    def follow_outputs(self) -> OutputParts:
        """Let the pass show how outputs of weights are split; call it before the pass."""
        self.outputs = OutputParts(self._names)
        return self.outputs

    @staticmethod
    def kind(module: nn.Module) -> Any:
        """What is known of a module that is written down."""
        return find_layer(module)

    def __enter__(self) -> Recorder:
        # as `register_forward_hook` does it, with one number for all instead of a handle each
        self._number = RemovableHandle(OrderedDict()).id
        sites = self.sites
        sites.now[:] = [self]
        sites.hooks = sites.hooks or [(m, self._hook(path, k)) for path, m, k in sites.by]
        for module, hook in sites.hooks:
            hooks: Any = module._forward_hooks
            hooks[self._number] = hook
            hooks.move_to_end(self._number, last=False)  # first of all
            module._forward_hooks_with_kwargs[self._number] = True
        if sites.listening:
            self._mode = FunctionMode(self)
            self._mode.__enter__()
        if self.outputs is not None:
            self.outputs.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.outputs is not None:
            self.outputs.__exit__(*exc)
        if self._mode is not None:
            self._mode.__exit__(*exc)
            self._mode = None
            self.sites.listening = any(e.site.function for e in self.entries)
        self.sites.now.clear()
        for module, _ in self.sites.hooks:
            module._forward_hooks.pop(self._number, None)
            module._forward_hooks_with_kwargs.pop(self._number, None)

    def _hook(self, path: str, layer: Layer) -> Any:
        now = self.sites.now  # which owns no module, so that the hook owns none

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if args:
                x = args[0]
            else:
                x = next(iter(kwargs.values()), None)
            if not isinstance(output, Tensor) or not isinstance(x, Tensor):
                return None
            if not now or not output.requires_grad:
                return None
            return now[0]._module(path, module, layer, x, output)

        return record

    def _module(
        self, path: str, module: nn.Module, layer: Layer, x: Tensor, output: Tensor
    ) -> Tensor | None:
        site = self.sites.site(path, module, layer)
        if site is None:
            return None
        if self.entries:
            last = self.entries[-1]
        else:
            last = None
        if last is not None and last.site.function and output.grad_fn is not None:
            shown = {*filter(None, last.names.values())}
            if shown > {*filter(None, site.names.values())} and last.edge.node is output.grad_fn:
                return None  # the function shows what the module's weight was made of
        own = type(layer).__module__.startswith(__package__ or "")  # which calls one function
        self.forget(site.names.values(), 1 if own else None)
        return self._write_down(site, x, output)

    def _write_down(self, site: Site, x: Tensor, output: Tensor) -> Tensor:
        if x.is_nested or output.is_nested:
            raise PullbackError(
                f"The layer of {site.path!r} received a nested tensor",
                "inputs and cotangents of a layer are read along dense axes",
                "Pad it, x.to_padded_tensor(0.0), and leave padded positions out of the loss, or "
                "do not give the layer's parameters to the optimizer",
            )
        entry, output = self._entry(site, x, output)
        self.entries.append(entry)
        if self.outputs is not None:
            self.outputs.start(site.names.get("weight"), site.module, output)
        return output

    def forget(self, names: Collection[str | None], count: int | None = None) -> None:
        """Strike out the last functions that use these parameters alone: a module shows them."""
        if count is None:
            last = len(self.entries)
        else:
            last = count
        while last and self.entries and self.entries[-1].site.function:
            if not {*self.entries[-1].names.values()} <= {*names, None}:
                return
            self.entries.pop()
            last -= 1

    def is_parameter(self, t: Tensor) -> bool:
        """Whether it is a parameter that takes part."""
        return id(t) in self._names

    def note(self, key: Any, make: Callable[[], nn.Module], x: Tensor, output: Tensor) -> Tensor:
        """Write down a use by a function, of the module that stands for it."""
        return self._write_down(self.sites.function(key, make), x, output)

    def _entry(self, site: Site, x: Tensor, output: Tensor) -> tuple[Entry, Tensor]:
        """What is written down, and the output to go on with."""
        if output._is_view():  # an in-place activation would replace a view's node
            output = output.clone()
        return Entry(site, x.detach(), edge_of(output), output.shape), output

    def signature(self, call: Call) -> Any:
        """What the established structure depends on: parameters, layers, shapes and modes."""
        layers = tuple(
            (e.path, e.shape, tuple(e.input.shape), e.module.training) for e in self.entries
        )
        inputs = tuple((tuple(t.shape), t.dtype) for t in call.tensors)
        names = tuple(self._names.values())
        return names, layers, inputs, call.autocast, torch.get_default_dtype()


@dataclass(frozen=True)
class CompoundCall:
    """One call of a compound layer: its arguments, and where its outputs' cotangents appear."""

    path: str
    module: nn.Module
    compound: Compound
    args: Any
    kwargs: dict[str, Any]
    edges: list[GradientEdge | None]
    #: what its replay leaves out, and then where its arguments stand in the graph
    note: str
    below: list[GradientEdge]


class ForwardRecord(Recorder):
    """A recorder that also keeps the arguments of compound layers."""

    def __init__(
        self, model: nn.Module, leaves: Mapping[str, Tensor], sites: Sites | None = None
    ) -> None:
        super().__init__(model, leaves, sites)
        self.compounds: list[CompoundCall] = []
        #: how many nodes the pass added to the graph: it shows what is done outside of layers
        self.nodes = 0
        #: the linear layer that gave a large output
        self.head: int | None = None

    @staticmethod
    def kind(module: nn.Module) -> Compound | Layer | None:
        """A compound layer, or one that has factors to give."""
        found = find_layer(module, Compound) or find_layer(module)
        if found is None or found.curvature == "rows":
            return None
        return found

    def _hook(self, path: str, layer: Any) -> Any:
        compound = layer.curvature == "compound"
        if compound:
            return self._keep(path, layer)
        return super()._hook(path, layer)

    def _entry(self, site: Site, x: Tensor, output: Tensor) -> tuple[Entry, Tensor]:
        if output._is_view():
            output = output.clone()
        if site.layer.curvature == "units":
            normalization = _read_normalization(output)
            return Entry(site, x.detach(), edge_of(output), output.shape, normalization), output
        return Entry(site, _input_as_used(x, output), edge_of(output), output.shape), output

    def release(self, node: Any) -> None:
        """Do not hold this node of the graph; `edges` takes it again."""
        empty: Any = None
        for entry in self.entries:
            if entry.edge.node is node:
                entry.edge = GradientEdge(empty, entry.edge.output_nr)
        for call in self.compounds:
            for i, edge in enumerate(call.edges):
                if edge is not None and edge.node is node:
                    call.edges[i] = GradientEdge(empty, edge.output_nr)
            call.below[:] = [e for e in call.below if e.node is not node]

    def edges(self, node: Any) -> list[GradientEdge]:
        """Where cotangents are wanted: the layers' outputs, then those of compound layers."""
        found = [e.edge for e in self.entries]
        found += [e for call in self.compounds for e in call.edges if e is not None]
        return [e if e.node is not None else GradientEdge(node, e.output_nr) for e in found]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which modules are in training mode."""
        return tuple([module.training for module in self.sites.modules.values()])

    def name(self, parameter: Tensor | None) -> str | None:
        """The name of a parameter that takes part."""
        if parameter is None:
            return None
        return self._names.get(id(parameter))

    def __enter__(self) -> ForwardRecord:
        super().__enter__()
        self.nodes = -_AUTOGRAD._get_sequence_nr()
        return self

    def __exit__(self, *exc: object) -> None:
        self.nodes += _AUTOGRAD._get_sequence_nr()
        super().__exit__(*exc)

    def _keep(self, path: str, compound: Compound) -> Any:
        now = self.sites.now

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not now or not torch.is_grad_enabled():
                return None
            now[0].forget({now[0].name(p) for p in module.parameters()})
            output = _separate(output, compound.select_outputs(module, output))
            tensors = compound.select_outputs(module, output)
            edges = [edge_of(t) if t.requires_grad else None for t in tensors]
            if any(e is not None for e in edges):
                saved = (detach_tensors(args), detach_tensors(kwargs))
                note = compound.describe_omission(module)
                if note:
                    given = list_tensors((args, kwargs))
                else:
                    given = []
                below = [edge_of(t) for t in given if t.requires_grad]
                call = CompoundCall(path, module, compound, *saved, edges, note, below)
                now[0].compounds.append(call)
            return output

        return keep

    def find_head(self, node: Any) -> bool:
        """Note the plain linear layer of this node, before it is released; True if there is one."""
        for i, entry in enumerate(self.entries):
            if type(entry.module) is nn.Linear and entry.edge.node is node:
                self.head = i
        return self.head is not None

    def head_output(self, dtype: torch.dtype) -> Tensor:
        """Return the output of the head, computed again: logits take much memory if kept."""
        assert self.head is not None
        entry = self.entries[self.head]
        held: Any = entry.module._parameters
        if held["bias"] is None:
            bias = None
        else:
            bias = held["bias"].detach().to(dtype)
        with torch.autocast(entry.input.device.type, enabled=False):
            return F.linear(entry.input.to(dtype), held["weight"].detach().to(dtype), bias)


def _separate(output: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a layer's output with copies of the tensors from which others of it are computed.

    A cotangent at such a copy comes from outside of the layer alone: an LSTM cell's c gives its h.
    """
    nodes: set[Any] = {t.grad_fn for t in tensors} - {None}

    def since(first: int, node: Any) -> list[Any]:
        below = [n for n, _ in node.next_functions if n is not None]
        return [n for n in below if n._sequence_nr() >= first]

    inner = {
        node
        for node in nodes
        for other in nodes - {node}
        if node in collect_reachable_nodes(other, partial(since, node._sequence_nr()))
    }
    return pytree.tree_map_only(Tensor, lambda t: t.clone() if t.grad_fn in inner else t, output)


def _input_as_used(x: Tensor, output: Tensor) -> Tensor:
    """A layer's input in half precision if its output is, from the copy that autocast keeps."""
    dtype = output.dtype
    x = x.detach()
    if dtype not in _HALF or x.dtype == dtype or not x.is_floating_point():
        return x
    kept = None
    if _packed():
        node = None
    else:
        node = output.grad_fn
    for _ in range(3):  # the product itself, perhaps below a view and a copy of it
        if node is None or kept is not None:
            break
        if node.name() in _ROWS:
            kept = getattr(node, _ROWS[node.name()])
        else:
            kept = None
        if node.next_functions:
            node = node.next_functions[0][0]
        else:
            node = None
    if kept is None or kept.dtype != dtype or kept.numel() != x.numel():
        return x.to(dtype)
    if kept.is_contiguous():
        return kept.detach().view(x.shape)
    return x.to(dtype)


def _read_normalization(output: Tensor) -> Normalization | None:
    """Return mean and 1/σ of the batch, which a normalization saves for its backward pass."""
    node: Any = output.grad_fn
    if node is None or node.name() not in _NORMS or _packed():
        return None
    mean = node._saved_result1.detach()
    scale = node._saved_result2.detach()
    if mean.numel() == scale.numel() == output.shape[1]:
        return Normalization(mean, scale)
    return None


def _packed() -> bool:
    """Whether saved tensors are packed, as by checkpoints: they may be unpacked but once."""
    return _PACKING is None or _PACKING(True) is not None
