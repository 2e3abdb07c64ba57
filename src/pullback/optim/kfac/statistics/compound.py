"""The affine maps inside compound layers, replayed with the cotangents at the layer's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from ...._core.graph import Root, reached_outside
from ....maps.layers import Tap
from ....maps.layers.moments import Moments, Sharing, counted, moments, second_moment
from ....maps.proof import Proof, accumulate, norm
from .plan import BlockPlan, LayerUse
from .record import CompoundCall, ForwardRecord
from .sums import Pool, Role

#: a layer's affine maps with their cotangents, step by step
Maps = Sequence[tuple[Tap, list[Tensor]]]


class CompoundReplays:
    """The compound layers of one pass.

    Args:
        record: what the pass did.
        cotangents: at the outputs of these layers that stand in the graph, in order.
    """

    def __init__(self, record: ForwardRecord, cotangents: Sequence[Tensor | None]) -> None:
        self._name = record.name
        self._found: list[tuple[CompoundCall, list[Tensor | None], Maps]] = []
        pieces = iter(cotangents)
        for call in record.compounds:
            ends = [None if e is None else next(pieces) for e in call.edges]
            if any(d is not None for d in ends):
                self._found.append((call, ends, _replay(call, ends)))

    def _names(self, tap: Tap) -> dict[str, str | None]:
        return {"weight": self._name(tap.weight), "bias": self._name(tap.bias)}

    @property
    def uses(self) -> list[LayerUse]:
        """The maps, as a plan of blocks sees them."""
        return [
            LayerUse(self._names(tap), "kronecker", True)
            for *_, maps in self._found
            for tap, _ in maps
        ]

    @property
    def remarks(self) -> dict[str, str]:
        """What `coverage` says of parameters whose layer did not do what its replay does."""
        return {
            name: f"{type(call.module).__name__}, replayed without {call.note}"
            for call, _, maps in self._found
            if call.note
            for tap, _ in maps
            for name in self._names(tap).values()
            if name is not None
        }

    def prove(self, proof: Proof, root: Root, leaves: Mapping[str, Tensor]) -> None:
        """Tell the proof what the maps give; layers with dropout are proven by themselves."""
        random = [(call, ends) for call, ends, _ in self._found if call.note]
        own: dict[str, Tensor] = {}
        for call, ends in random:
            accumulate(own, self._alone(call, ends))
        parts = [(call.edges, call.below) for call, _ in random]
        others = reached_outside(root, parts) if own else set()
        proof.add_alone(own, {n for n in own if get_gradient_edge(leaves[n]).node in others})
        for *_, maps in self._found:
            # what cancels inside a layer, before q and k where there is one key, leaves round-off
            largest = torch.stack([norm(d) for _, deltas in maps for d in deltas]).amax()
            for tap, deltas in maps:
                d, a = torch.cat(list(deltas), 1), torch.cat(list(tap.inputs), 1)
                names, size = self._names(tap), norm(a)
                values = {names["weight"]: d.mT @ a, names["bias"]: d.sum(1)}
                given = {n: value for n, value in values.items() if n is not None}
                proof.add(given, largest, size, d.numel())

    def _alone(self, call: CompoundCall, ends: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """A layer's gradients by itself, without what its replay leaves out."""
        outputs = call.compound.alone(call.module, call.args, call.kwargs)
        named = {n: p for p in call.module.parameters() if (n := self._name(p)) is not None}
        found = _pull(outputs, list(named.values()), ends)
        return {n: g for n, g in zip(named, found, strict=True) if g is not None}

    def add_to(
        self, pool: Pool, plan: BlockPlan, sharing: Sharing, keep: Tensor | None, *, inputs: bool
    ) -> None:
        """Add the moments; `keep` says which places of the output count, in its layout."""
        if keep is not None:
            keep = keep.movedim(min(sharing.batch_dim, keep.ndim - 1), 0)
        for call, _, maps in self._found:
            role = Role(type(call.compound).__name__)
            for tap, deltas in maps:
                if not any(tap.places):
                    continue
                names, delta = self._names(tap), torch.cat(list(deltas), 1)
                second = second_moment(delta, sharing)
                if (key := plan.weight_block(names)) is not None:
                    if inputs:
                        pool.of(key).add_inputs(role, _inputs(tap, delta, sharing, keep))
                    pool.of(key).add_outputs(role, second)
                if (key := plan.bias_block(names)) is not None:
                    pool.of(key).add_bias(second.clone())


def _replay(call: CompoundCall, cotangents: Sequence[Tensor | None]) -> Maps:
    """The maps of one layer with their cotangents."""
    outputs, taps = call.compound.replay(call.module, call.args, call.kwargs)
    targets = [z for tap in taps for z in tap.outputs]
    found = iter(_pull(outputs, targets, cotangents))
    pairs = [(tap, [(next(found), z) for z in tap.outputs]) for tap in taps]
    return [(t, [torch.zeros_like(z) if d is None else d for d, z in ds]) for t, ds in pairs]


def _pull(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    pairs = [(y, d.to(y.dtype)) for y, d in zip(outputs, cotangents, strict=True) if d is not None]
    ends, given = [y for y, _ in pairs], [d for _, d in pairs]
    return torch.autograd.grad(ends, targets, given, allow_unused=True)


def _inputs(tap: Tap, delta: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
    x = torch.cat([a.detach() for a in tap.inputs], 1)
    if keep is not None:
        return moments(x, sharing, _counted(tap, delta, keep))
    found = moments(x, sharing)
    if len(set(tap.places)) == 1:
        return Moments(found.second, found.first, tap.places[0])
    return Moments(found.second, found.first, found.first.new_tensor(tap.places))


def _counted(tap: Tap, delta: Tensor, keep: Tensor) -> Tensor:
    """Which of the places of δ (G, P, O) count, (G, P), by that and the output's mask."""
    grids, axis = tap.grids or [(n, 1) for n in tap.places], tap.batch_dim if tap.grids else 0
    rows = []
    for own, n, grid in zip(delta, tap.places, grids, strict=True):
        mask = counted(own[:n].unflatten(0, grid).movedim(axis, 0), keep).movedim(0, axis)
        rows.append(F.pad(mask.flatten(), (0, delta.shape[1] - n)))
    return torch.stack(rows)
