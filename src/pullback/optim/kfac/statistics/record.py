"""What one forward pass did: every use of a layer, and the compound layers to be replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from ...._core.capture import Call, detach_tensors, unwrap_model
from ...._core.graph import collect_reachable_nodes
from ...._core.shards import without_sharding_hooks
from ....maps.layers import Compound, Layer, find
from ....maps.layers.compound import tensors_of
from ....maps.record import Entry, Recorder, Site, Sites, edge_of

_HALF = (torch.float16, torch.bfloat16)
_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
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
        found = find(module, Compound) or find(module)
        return None if found is None or found.curvature == "rows" else found

    def _hook(self, path: str, layer: Any) -> Any:
        compound = layer.curvature == "compound"
        return self._keep(path, layer) if compound else super()._hook(path, layer)

    def _entry(self, site: Site, x: Tensor, output: Tensor) -> tuple[Entry, Tensor]:
        output = output.clone() if output._is_view() else output
        if site.layer.curvature == "units":
            return Entry(site, x.detach(), edge_of(output), output.shape, _kept_by(output)), output
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
        return None if parameter is None else self._names.get(id(parameter))

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
            output = _separate(output, compound.outputs(module, output))
            tensors = compound.outputs(module, output)
            edges = [edge_of(t) if t.requires_grad else None for t in tensors]
            if any(e is not None for e in edges):
                saved, note = (detach_tensors(args), detach_tensors(kwargs)), compound.note(module)
                given = tensors_of((args, kwargs)) if note else []
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
        bias = None if held["bias"] is None else held["bias"].detach().to(dtype)
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
    dtype, x = output.dtype, x.detach()
    if dtype not in _HALF or x.dtype == dtype or not x.is_floating_point():
        return x
    kept, node = None, None if _packed() else output.grad_fn
    for _ in range(3):  # the product itself, perhaps below a view and a copy of it
        if node is None or kept is not None:
            break
        kept = getattr(node, _ROWS[node.name()]) if node.name() in _ROWS else None
        node = node.next_functions[0][0] if node.next_functions else None
    if kept is None or kept.dtype != dtype or kept.numel() != x.numel():
        return x.to(dtype)
    return kept.detach().view(x.shape) if kept.is_contiguous() else x.to(dtype)


def _kept_by(output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and 1/σ of the batch, which a normalization keeps for its own backward pass."""
    node: Any = output.grad_fn
    if node is None or node.name() not in _NORMS or _packed():
        return None
    mean, scale = node._saved_result1.detach(), node._saved_result2.detach()
    return (mean, scale) if mean.numel() == scale.numel() == output.shape[1] else None


def _packed() -> bool:
    """Whether saved tensors are packed, as by checkpoints: they may be unpacked but once."""
    return _PACKING is None or _PACKING(True) is not None


class RepeatedCall:
    """A forward pass in compiled code, repeated outside of it with its buffers and randomness.

    That of a sharded model is repeated with its whole parameters, `params`.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        params: Mapping[str, Tensor] | None = None,
    ) -> None:
        device = next((p.device for p in unwrap_model(model).parameters()), torch.device("cpu"))
        self._model, self.params = model, params
        self._call = Call.record_start(model, args, kwargs, device)

    def __call__(self, record: ForwardRecord) -> Any:
        """Return the output, with the layers on the way in `record`."""
        call, module = self._call, unwrap_model(self._model)
        buffers = _reparametrize_module(module, call.buffers or {}, tie_weights=True)
        with torch.enable_grad(), call.replay_context(), buffers, record:
            return self._model(*call.args, **call.kwargs)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Let a sharded model hold its whole parameters, as plain modules do."""
        module = unwrap_model(self._model)
        if self.params is None:
            yield
            return
        with (
            without_sharding_hooks(module),
            _reparametrize_module(module, dict(self.params), tie_weights=True),
        ):
            yield
