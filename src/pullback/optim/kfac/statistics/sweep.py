r"""One covector sent down the graph: every layer's moments are taken while its cotangent passes.

The cotangents of all layers together take as much memory as the activations, so none is kept: a
hook before each layer's node adds up Σ δδᵀ and lets δ go (on a GPU small ones wait for others like
them). To make the engine run through all of these nodes it suffices to ask for the cotangents at
the *last* layers on the way, those below which there is no other. On a GPU the inputs' Σ āāᵀ wait
until the pass is over, and its cotangents with it: the first layers' are the largest, and the last
layers' moments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.space import compute_dtype
from ....maps.layers import AffineBlock, Block, Layer, Use
from ....maps.layers.moments import Moments, Sharing
from ....maps.layers.scale import Scale
from ....maps.layers.units import UnitSums, second_moments
from ....maps.record import Entry
from ..blocks.inverse import Inverse
from .coupling import Coupling
from .plan import Plan
from .sums import Key, Sums, Term, add_bias, held_by
from .waiting import Waiting

_FEW = 2**18  # entries of a normalization's sums that may wait for those of others


@dataclass(slots=True)
class Met:
    """What one use of a layer met: sums over its places, whatever block they will belong to."""

    inputs: Moments | None = None
    #: what the layer saw, of which the inputs' moments are to be formed
    seen: Tensor | None = None
    outputs: Tensor | None = None
    shifts: Tensor | None = None
    #: sums by sample of gain and shift, until Σ rows rowsᵀ, (U, k, k), is formed of them
    rows: UnitSums | None = None
    units: Tensor | None = None
    roles: list[str] = field(default_factory=list)
    #: second moments in the eigenbases of this block
    squares: Tensor | None = None
    basis: Key | None = None


class Sweep:
    """One pass over the layers of a recorded forward pass.

    Args:
        entries: the uses of layers.
        sharing: how places enter.
        keep: which places of the output count.
        inputs: whether to take the inputs' moments as well.
        wanted: whether anything is to be learned from a use.
        basis: eigenbases for the second moments of a use's gradients, or None.
        proof: told of every use and its cotangent, where the structure is yet to be proven.
        coupling: how the samples are related, where the metric does.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        sharing: Sharing,
        keep: Tensor | None,
        *,
        inputs: bool,
        wanted: Callable[[Entry], bool],
        basis: Callable[[Entry], tuple[Key, Inverse] | None] | None,
        proof: Callable[[Entry, Tensor], None] | None,
        coupling: Coupling | None = None,
    ) -> None:
        self._entries, self._sharing, self._keep = entries, sharing, keep
        self._inputs, self._wanted, self._basis, self._proof = inputs, wanted, basis, proof
        self._coupling, self._waiting = coupling, Waiting(sharing)
        self.met: dict[int, Met] = {}

    def hooks(self, edges: Sequence[GradientEdge]) -> list[Any]:
        """Stand before the layers' nodes; the handles are to be removed."""
        by_node: dict[Any, list[tuple[int, int]]] = {}
        for i, edge in enumerate(edges):
            by_node.setdefault(edge.node, []).append((i, edge.output_nr))

        def hook(own: list[tuple[int, int]]) -> Callable[[Any], None]:
            def before(cotangents: Any) -> None:
                for i, number in own:
                    if cotangents[number] is not None:
                        self.consume(i, cotangents[number])

            return before

        return [node.register_prehook(hook(own)) for node, own in by_node.items()]

    def consume(self, i: int, delta: Tensor) -> None:
        """The cotangent of one use, once; without gradients and autocast, as the pass itself."""
        if i in self.met:
            return
        entry = self._entries[i]
        delta = delta.reshape(entry.shape)  # of a linear layer's rows, which it gave a view of
        self.met[i] = met = Met()
        if self._proof is not None:
            self._proof(entry, delta)
        if self._wanted(entry):
            self._measure(entry, delta, met)

    def _measure(self, entry: Entry, delta: Tensor, met: Met) -> None:
        module, layer, x, sharing = entry.module, entry.layer, entry.input, self._sharing
        coupling = self._coupling
        if layer.curvature == "units":
            assert isinstance(layer, Scale)
            met.roles = [r for r, n in entry.names.items() if n is not None]
            if coupling is None:
                met.rows = layer.unit_sums(module, x, delta, met.roles, sharing, entry.kept)
                if met.rows.shape.numel() > _FEW:
                    _form([met])
            else:
                met.units = coupling.units(entry, delta, met.roles, sharing)
            return
        if x.is_floating_point() and delta.dtype in (torch.float16, torch.bfloat16):
            x = x.to(delta.dtype)  # as the layer itself saw it
        if coupling is not None:
            x, delta = coupling.prepared(entry, delta, sharing)
        if entry.names.get("weight") is not None:
            if self._inputs and coupling is not None:
                met.inputs = coupling.inputs(entry, x, sharing)
            elif self._inputs and waits(x):
                met.seen = x
            elif self._inputs:
                met.inputs = layer.inputs(module, x, sharing, self._keep)
            if entry.names.get("bias") is None and layer.waits(module, delta, sharing):
                self._waiting.add(layer, met, delta)
            else:
                self._waiting.make_room(delta)
                met.outputs = layer.outputs(module, x, delta, sharing)
        if entry.names.get("bias") is not None:
            joint = layer.joint and met.outputs is not None
            met.shifts = met.outputs if joint else layer.shifts(module, x, delta, sharing)
        if self._basis is not None and (found := self._basis(entry)) is not None:
            key, basis = found
            met.basis = key
            block, _ = block_of(entry, delta, sharing, key.names)
            if isinstance(block, AffineBlock):
                basis = basis.moved(delta.device, compute_dtype(delta.dtype))
                met.squares = block.squares(basis.left, basis.right)

    def assign(self, plan: Plan, sums: dict[Key, Sums]) -> None:
        """Add what was met to the blocks it belongs to."""
        self._waiting.form()
        alike: dict[Any, list[Met]] = {}
        for met in self.met.values():
            if met.rows is not None:
                alike.setdefault(met.rows.kind, []).append(met)
        for some in alike.values():
            _form(some)
        self._form_inputs(plan)
        for i, met in sorted(self.met.items()):
            entry = self._entries[i]
            if met.units is not None:
                for key, roles in plan.units(entry.names):
                    units, at = met.units, [met.roles.index(r) for r in roles]
                    if at != list(range(units.shape[1])):
                        units = units[:, at][:, :, at]
                    held_by(sums, key).add_squares(units)
                continue
            key = plan.weight(entry.names)
            if key is not None and met.outputs is not None:
                held = held_by(sums, key)
                term = Term.of(entry.layer)
                if met.inputs is not None:
                    held.add_inputs(term, met.inputs)
                held.add_outputs(term, met.outputs)
                if met.squares is not None and met.basis == key:
                    held.add_squares(met.squares)
            key = plan.bias(entry.names)
            if key is not None and met.shifts is not None:
                shared = met.shifts is met.outputs
                add_bias(held_by(sums, key), met.shifts.clone() if shared else met.shifts)

    def _form_inputs(self, plan: Plan) -> None:
        """Σ āāᵀ of the uses that a block learns from, those of one kind of layer at once."""
        kinds: dict[Layer, list[tuple[Entry, Met, Tensor]]] = {}
        for i, met in sorted(self.met.items()):
            entry = self._entries[i]
            if met.seen is not None and plan.weight(entry.names) is not None:
                kinds.setdefault(entry.layer, []).append((entry, met, met.seen))
            met.seen = None
        for layer, some in kinds.items():
            uses = [(entry.module, x) for entry, _, x in some]
            found = layer.inputs_of(uses, self._sharing, self._keep)
            for (_, met, _), moments in zip(some, found, strict=True):
                met.inputs = moments


def waits(x: Tensor) -> bool:
    """Whether memory is worth waiting for, and several layers at once are cheaper."""
    return x.device.type != "cpu"


def _form(some: Sequence[Met]) -> None:
    """Σ rows rowsᵀ of all units at once."""
    found = second_moments([met.rows for met in some if met.rows is not None])
    for met, own in zip(some, found, strict=True):
        met.rows, met.units = None, own


def block_of(
    entry: Entry, delta: Tensor, sharing: Sharing, wanted: Collection[str | None]
) -> tuple[Block, int]:
    """The block of rows of one use, and how many samples it has."""
    features = entry.layer.features(entry.module, delta.ndim)
    dtype, x = compute_dtype(delta.dtype), entry.input
    x = x.to(dtype) if x.is_floating_point() else x
    lead = delta.ndim - features
    if lead == 0:
        x, delta = x[None], delta[None]
    elif lead > 1:
        x, delta = x.movedim(sharing.batch_dim, 0), delta.movedim(sharing.batch_dim, 0)
    names = {r: n if n in wanted else None for r, n in entry.names.items()}
    use = Use(entry.module, x, delta.to(dtype)[:, None], features)
    return entry.layer.block(names, [use]), len(delta)


def wanted_by(plan: Plan | None, apart: Collection[str]) -> Callable[[Entry], bool]:
    """Whether a use's parameters have a block that it adds to; those of `apart` have none."""
    plain = {*apart, *(() if plan is None else plan.plain)}
    if not plain:
        return lambda entry: True
    return lambda entry: any(n is not None and n not in plain for n in entry.names.values())


def basis_by(
    entries: Sequence[Entry], bases: Mapping[Key, Inverse]
) -> Callable[[Entry], tuple[Key, Inverse] | None] | None:
    """The eigenbases of a use's block, where it is the block's only use."""
    by_weight = {k.names[0]: k for k, b in bases.items() if b.scale is not None and not k.bias}
    if not by_weight:
        return None
    uses = Counter(e.names.get("weight") for e in entries)

    def basis(entry: Entry) -> tuple[Key, Inverse] | None:
        weight = entry.names.get("weight")
        key = by_weight.get(weight or "")
        return None if key is None or uses[weight] > 1 else (key, bases[key])

    return basis
