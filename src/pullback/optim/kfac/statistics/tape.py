"""What one forward pass did: every use of a layer, and the compound layers to be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ...._core.capture import detached
from ....maps.layers import Compound, Layer, find, find_compound
from ....maps.layers.compound import tensors_of
from ....maps.record import Entry, Recorder, Site, Sites, edge_of
from .seen import normalized_by, seen


@dataclass(frozen=True)
class Whole:
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


class Tape(Recorder):
    """A recorder that also keeps the arguments of compound layers."""

    def __init__(
        self, model: nn.Module, leaves: Mapping[str, Tensor], sites: Sites | None = None
    ) -> None:
        super().__init__(model, leaves, sites)
        self.wholes: list[Whole] = []
        #: how many nodes the pass added to the graph: it shows what is done outside of layers
        self.nodes = 0
        #: the linear layer that gave a large output
        self.head: int | None = None

    @staticmethod
    def kind(module: nn.Module) -> Compound | Layer | None:
        """A compound layer, or one that has factors to give."""
        if (compound := find_compound(module)) is not None:
            return compound
        layer = find(module)
        return None if layer is None or layer.curvature == "rows" else layer

    def _hook(self, path: str, layer: Any) -> Any:
        return (
            self._keep(path, layer) if isinstance(layer, Compound) else super()._hook(path, layer)
        )

    def _entry(self, site: Site, x: Tensor, output: Tensor) -> tuple[Entry, Tensor]:
        """Of a linear layer that gives a view of all of its rows, the edge is that of the rows.

        Their node stays whatever is done to the view, which need not be copied for that.
        """
        rows = rows_of(site.module, output)
        if rows is None:
            output = rows = output.clone() if output._is_view() else output
        edge, shape = edge_of(rows), output.shape
        if site.layer.curvature == "units":
            return Entry(site, x.detach(), edge, shape, normalized_by(output)), output
        kept = seen(x, rows)
        return Entry(site, x.detach() if kept is x else kept, edge, shape), output

    def release(self, node: Any) -> None:
        """Do not hold this node of the graph; `edges` takes it again."""
        own = [i for i, e in enumerate(self.entries) if e.edge.node is node]
        for i in own:
            held = self.entries[i]
            self.entries[i] = replace(held, edge=_without(held.edge))
        for whole in self.wholes:
            for i, edge in enumerate(whole.edges):
                if edge is not None and edge.node is node:
                    whole.edges[i] = _without(edge)
            whole.below[:] = [e for e in whole.below if e.node is not node]

    def edges(self, node: Any) -> list[GradientEdge]:
        """Where cotangents are wanted: the layers' outputs, then those of compound layers."""
        found = [e.edge for e in self.entries]
        found += [e for whole in self.wholes for e in whole.edges if e is not None]
        return [e if e.node is not None else GradientEdge(node, e.output_nr) for e in found]

    def name(self, parameter: Tensor | None) -> str | None:
        """The name of a parameter that takes part."""
        return None if parameter is None else self._names.get(id(parameter))

    def __enter__(self) -> Tape:
        super().__enter__()
        self.nodes = -_nodes()
        return self

    def __exit__(self, *exc: object) -> None:
        self.nodes += _nodes()
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
                now[0].wholes.append(Whole(path, module, compound, *saved, edges, note, below))

        return keep


def rows_of(module: nn.Module, output: Tensor) -> Tensor | None:
    """The rows (places, O) that a linear layer computed, where its output is a view of them."""
    rows = output._base if type(module) is nn.Linear else None
    if rows is None or rows.grad_fn is None:
        return None
    plain = rows.numel() == output.numel() and rows.is_contiguous() and output.is_contiguous()
    return rows if plain else None


def _nodes() -> int:
    """How many nodes this thread has made so far."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def _without(edge: GradientEdge) -> GradientEdge:
    return GradientEdge(None, edge.output_nr)  # pyright: ignore[reportArgumentType]
