"""What one forward pass did: every use of a layer, and the compound layers to be replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from ...._core.capture import Call, detached, plain
from ...._core.state import RandomState
from ....maps.layers import Compound, Layer, find
from ....maps.layers.compound import tensors_of
from ....maps.record import Entry, Recorder, Site, Sites, edge_of

_HALF = (torch.float16, torch.bfloat16)
_ROWS = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_PACKING = getattr(_AUTOGRAD, "_top_saved_tensors_default_hooks", None)


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
    note: str = ""
    below: list[GradientEdge] = field(default_factory=list)


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
        found = find(module, Compound) or find(module)
        return None if found is None or found.curvature == "rows" else found

    def _hook(self, path: str, layer: Any) -> Any:
        compound = layer.curvature == "compound"
        return self._keep(path, layer) if compound else super()._hook(path, layer)

    def _entry(self, site: Site, x: Tensor, output: Tensor) -> tuple[Entry, Tensor]:
        """Of a linear layer that gives a view of all of its rows, the edge is that of the rows.

        Their node stays whatever is done to the view, which need not be copied for that.
        """
        rows = rows_of(site.module, output)
        if rows is None:
            output = rows = output.clone() if output._is_view() else output
        edge, shape = edge_of(rows), output.shape
        if site.layer.curvature == "units":
            return Entry(site, x.detach(), edge, shape), output
        return Entry(site, _input_as_used(x, rows), edge, shape), output

    def release(self, node: Any) -> None:
        """Do not hold this node of the graph; `edges` takes it again."""
        for i, held in enumerate(self.entries):
            if held.edge.node is node:
                self.entries[i] = replace(held, edge=_without_node(held.edge))
        for call in self.compounds:
            for i, edge in enumerate(call.edges):
                if edge is not None and edge.node is node:
                    call.edges[i] = _without_node(edge)
            call.below[:] = [e for e in call.below if e.node is not node]

    def edges(self, node: Any) -> list[GradientEdge]:
        """Where cotangents are wanted: the layers' outputs, then those of compound layers."""
        found = [e.edge for e in self.entries]
        found += [e for call in self.compounds for e in call.edges if e is not None]
        return [e if e.node is not None else GradientEdge(node, e.output_nr) for e in found]

    def name(self, parameter: Tensor | None) -> str | None:
        """The name of a parameter that takes part."""
        return None if parameter is None else self._names.get(id(parameter))

    def __enter__(self) -> ForwardRecord:
        super().__enter__()
        self.nodes = -_node_count()
        return self

    def __exit__(self, *exc: object) -> None:
        self.nodes += _node_count()
        super().__exit__(*exc)

    def _keep(self, path: str, compound: Compound) -> Any:
        now = self._sites.now

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not now or not torch.is_grad_enabled():
                return
            tensors = compound.outputs(module, output)
            edges = [edge_of(t) if t.requires_grad else None for t in tensors]
            if any(e is not None for e in edges):
                saved, note = (detached(args), detached(kwargs)), compound.note(module)
                given = tensors_of((args, kwargs)) if note else []
                below = [edge_of(t) for t in given if t.requires_grad]
                call = CompoundCall(path, module, compound, *saved, edges, note, below)
                now[0].compounds.append(call)

        return keep

    # --- an output that can be computed again -------------------------------------------------

    def find_head(self, z: Tensor, node: Any) -> None:
        """Note the plain linear layer that gave z, if one did, before its node is released."""
        for i, entry in reversed([*enumerate(self.entries)]):
            rows = rows_of(entry.module, z)
            own = node if rows is None else rows.grad_fn
            linear = type(entry.module) is nn.Linear and z.shape == entry.shape
            if linear and entry.edge.node is not None and entry.edge.node is own:
                self.head = i
                return

    def head_output(self, dtype: torch.dtype) -> Tensor:
        """The output of the head, computed again.

        The logits of a language model take more memory than anything else, and no backward pass
        needs them: that of log-softmax keeps its own result.
        """
        assert self.head is not None
        entry = self.entries[self.head]
        held = entry.module._parameters
        weight, bias = (
            None if t is None else t.detach().to(dtype) for t in (held["weight"], held["bias"])
        )
        assert weight is not None
        with torch.autocast(entry.input.device.type, enabled=False):
            return F.linear(entry.input.to(dtype), weight, bias)


def rows_of(module: nn.Module, output: Tensor) -> Tensor | None:
    """The rows (places, O) that a linear layer computed, where its output is a view of them."""
    rows = output._base if type(module) is nn.Linear else None
    if rows is None or rows.grad_fn is None:
        return None
    whole = rows.numel() == output.numel() and rows.is_contiguous() and output.is_contiguous()
    return rows if whole else None


def _input_as_used(x: Tensor, output: Tensor) -> Tensor:
    """A layer's input in the precision of its output, if that is half of its own.

    Under autocast the graph keeps such a copy for the layer's own backward pass, and the float32
    original need not stay.
    """
    dtype, x = output.dtype, x.detach()
    if dtype not in _HALF or x.dtype == dtype or not x.is_floating_point():
        return x
    kept, node = None, output.grad_fn
    for _ in range(3):  # the product itself, perhaps below a view and a copy of it
        if node is None or kept is not None or _packed():
            break
        kept = getattr(node, _ROWS[node.name()]) if node.name() in _ROWS else None
        node = node.next_functions[0][0] if node.next_functions else None
    if kept is None or kept.dtype != dtype or kept.numel() != x.numel():
        return x.to(dtype)
    return kept.detach().view(x.shape) if kept.is_contiguous() else x.to(dtype)


def _packed() -> bool:
    """Whether saved tensors are packed, as by checkpoints: they may be unpacked but once."""
    return _PACKING is None or _PACKING(True) is not None


def _node_count() -> int:
    """How many nodes this thread has made so far."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def _without_node(edge: GradientEdge) -> GradientEdge:
    return GradientEdge(None, edge.output_nr)  # pyright: ignore[reportArgumentType]


class ParameterSites:
    """The modules to be recorded, looked for again only where modules were exchanged.

    Args:
        model: not a compiled one's wrapper.
        chosen: parameters of it that take part.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, Tensor]) -> None:
        self._model, self._chosen = model, chosen
        self._leaves: tuple[tuple[bool, ...], dict[str, Tensor]] = ((), {})
        self._sites: Sites | None = None
        #: where the parameters are held: a module's own dict, the name there, the parameter
        self._homes: list[tuple[dict[str, Any], str, Tensor]] = []

    def leaves(self) -> tuple[tuple[bool, ...], dict[str, Tensor]]:
        """Which parameters require a gradient, and these: the same object while they do."""
        flags = tuple([p.requires_grad for p in self._chosen.values()])
        if flags != self._leaves[0]:
            self._leaves = flags, {n: p for n, p in self._chosen.items() if p.requires_grad}
        return self._leaves

    def sites(self) -> Sites | None:
        """None where the model holds other tensors, as in `torch.func.functional_call`."""
        sites = self._sites
        if sites is None or not sites.current:
            sites = self._sites = Sites(self._model, ForwardRecord.kind)
            places = [(n.rpartition("."), p) for n, p in self._chosen.items()]
            modules = sites.modules
            self._homes = [
                (modules[path]._parameters, own, p)
                for (path, _, own), p in places
                if path in modules
            ]
        if all([held.get(own) is p for held, own, p in self._homes]):
            return sites
        now = dict(self._model.named_parameters())
        same = all(n not in now or now[n] is p for n, p in self._chosen.items())
        return sites if same else None


class RepeatedCall:
    """How to repeat a forward pass that ran in compiled code, outside of it.

    Arguments, buffers and random numbers are those of the pass itself.
    """

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        device = next((p.device for p in plain(model).parameters()), torch.device("cpu"))
        kind = device.type
        self._model = model
        self._call = Call(detached(args), detached(kwargs), random=RandomState(device))
        self._call.output = torch.empty(0, device=device)
        if torch.is_autocast_enabled(kind):
            self._call.autocast = (kind, torch.get_autocast_dtype(kind))
        self._buffers = [(m, n, b.detach().clone()) for m, n, b in _buffers(model)]

    def __call__(self, record: ForwardRecord) -> Any:
        """The output, with the layers on the way in `record`."""
        call = self._call
        with torch.enable_grad(), call.replaying(), self._own_buffers(), record:
            return self._model(*call.args, **call.kwargs)

    @contextlib.contextmanager
    def _own_buffers(self) -> Iterator[None]:
        now = list(_buffers(self._model))
        for module, name, saved in self._buffers:
            module._buffers[name] = saved
        try:
            yield
        finally:
            for module, name, buffer in now:
                module._buffers[name] = buffer


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in plain(model).modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer
