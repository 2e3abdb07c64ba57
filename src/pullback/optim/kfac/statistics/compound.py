"""The affine maps inside compound layers, replayed with the cotangents at the layer's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from ...._core.graph import find_nodes_reached_outside
from ....grams.kronecker.packed_matrix import pack, unpack
from ....maps.layers import Tap
from ....maps.layers.moments import (
    Moments,
    Sharing,
    compute_moments,
    compute_second_moment,
    find_counted_positions,
)
from ....maps.proof import Proof, accumulate, norm
from ....maps.record import CompoundCall
from .covectors import Descent
from .plan import BlockPlan, LayerUse
from .sums import BIAS_OUTPUT, Pool, factors_of

#: a layer's affine maps, each with the cotangents (G, P, O) at the positions of all steps
Maps = Sequence[tuple[Tap, Tensor]]


class CompoundReplays:
    """The compound layers of one pass, with the cotangents at all their outputs in the graph.

    Where the metric relates samples their parameters are held as diagonals, and none is replayed.
    """

    def __init__(self, way: Descent, cotangents: Sequence[Tensor | None]) -> None:
        self._way = way
        self._calls: list[tuple[CompoundCall, list[Tensor | None]]] = []
        pieces = iter(cotangents)
        for call in way.record.compounds if way.coupling is None else ():
            ends = [None if e is None else next(pieces) for e in call.edges]
            if any(d is not None for d in ends):
                self._calls.append((call, ends))

    def _replayed(self) -> Iterator[tuple[CompoundCall, Maps]]:
        """Every layer with its maps; those of one are gone when the next is replayed."""
        for call, ends in self._calls:
            yield call, _replay(call, ends)

    def _names(self, tap: Tap) -> dict[str, str | None]:
        name = self._way.record.name
        return {"weight": name(tap.weight), "bias": name(tap.bias)}

    @property
    def uses(self) -> list[LayerUse]:
        """The maps, as a plan of blocks sees them."""
        return [
            LayerUse(self._names(tap), "kronecker", True, tap.form)
            for _, maps in self._replayed()
            for tap, _ in maps
        ]

    @property
    def remarks(self) -> dict[str, str]:
        """What `coverage` says of parameters whose layer did not do what its replay does."""
        out = {}
        for call, _ in self._calls:
            text = f"{type(call.module).__name__}, replayed without {call.note}"
            names = [self._way.record.name(p) for p in call.module.parameters()]
            out |= {n: text for n in names if n is not None and call.note}
        return out

    def prove(self, proof: Proof) -> None:
        """Add what the maps give to the proof; layers with dropout are proven by themselves."""
        random = [(call, ends) for call, ends in self._calls if call.note]
        own: dict[str, Tensor] = {}
        for call, ends in random:
            accumulate(own, self._alone(call, ends))
        parts = [(call.edges, call.below) for call, _ in random]
        leaves = self._way.leaves
        if own:
            others = find_nodes_reached_outside(self._way.root, parts)
        else:
            others = set()
        proof.add_isolated(own, {n for n in own if get_gradient_edge(leaves[n]).node in others})
        for _, maps in self._replayed():
            # what cancels inside a layer, before q and k where there is one key, leaves round-off
            largest = torch.stack([norm(delta) for _, delta in maps]).amax()
            for tap, delta in maps:
                a = torch.cat(tap.inputs, 1)
                names = self._names(tap)
                values = {names["weight"]: delta.mT @ a, names["bias"]: delta.sum(1)}
                given = {n: value for n, value in values.items() if n is not None}
                proof.add(given, largest, norm(a), delta.numel())

    def _alone(self, call: CompoundCall, ends: Sequence[Tensor | None]) -> dict[str, Tensor]:
        """A layer's gradients by itself, without what its replay leaves out."""
        outputs = call.compound.run_without_dropout(call.module, call.args, call.kwargs)
        name = self._way.record.name
        named = {n: p for p in call.module.parameters() if (n := name(p)) is not None}
        found = _pull(outputs, list(named.values()), ends)
        return {n: g for n, g in zip(named, found, strict=True) if g is not None}

    def add_to(self, pool: Pool, plan: BlockPlan) -> None:
        """Add the moments to the blocks of the plan."""
        keep = self._way.keep
        sharing = self._way.sharing
        if keep is not None:  # which positions of the output count, in its layout
            keep = keep.movedim(min(sharing.batch_dim, keep.ndim - 1), 0)
        for call, maps in self._replayed():
            for tap, delta in maps:
                if not any(tap.positions):
                    continue
                names = self._names(tap)
                second = pack(compute_second_moment(delta, sharing))
                if (key := plan.weight_block(names)) is not None:
                    inputs, outputs = factors_of(call.compound, key)
                    if self._way.inputs:
                        if keep is None:
                            mask = None
                        else:
                            mask = _counted(tap, delta, keep)
                        pool.of(key).add(inputs, tap_moments(tap, sharing, mask))
                    pool.of(key).add(outputs, second)
                if (key := plan.bias_block(names)) is not None:
                    pool.of(key).add(BIAS_OUTPUT, pack(unpack(second).clone()))


def tap_moments(tap: Tap, sharing: Sharing, mask: Tensor | None = None) -> Moments:
    """Return the moments of a map's inputs, at the positions of a mask (G, P) or at all."""
    found = compute_moments(torch.cat(tap.inputs, 1), sharing, mask)
    groups = tap.positions
    if mask is not None:
        return found
    same = len({*groups}) == 1  # not all positions are real
    return replace(found, positions=groups[0] if same else found.first.new_tensor(groups))


def _replay(call: CompoundCall, cotangents: Sequence[Tensor | None]) -> Maps:
    """The maps of one layer with their cotangents."""
    outputs, taps = call.compound.replay(call.module, call.args, call.kwargs)
    targets = [z for tap in taps for z in tap.outputs]
    found = zip(targets, _pull(outputs, targets, cotangents), strict=True)
    deltas = iter([torch.zeros_like(z) if d is None else d for z, d in found])
    return [(tap, torch.cat([next(deltas) for _ in tap.outputs], 1)) for tap in taps]


def _pull(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    pairs = [(y, d.to(y.dtype)) for y, d in zip(outputs, cotangents, strict=True) if d is not None]
    ends = [y for y, _ in pairs]
    given = [d for _, d in pairs]
    return torch.autograd.grad(ends, targets, given, allow_unused=True)


def _counted(tap: Tap, delta: Tensor, keep: Tensor) -> Tensor:
    """Which of the positions of δ (G, P, O) count, (G, P), by that and the output's mask."""
    grids = tap.grids or [(n, 1) for n in tap.positions]
    if tap.grids:
        axis = tap.batch_dim
    else:
        axis = 0
    rows = []
    for own, n, grid in zip(delta, tap.positions, grids, strict=True):
        mask = find_counted_positions(own[:n].unflatten(0, grid).movedim(axis, 0), keep).movedim(
            0, axis
        )
        rows.append(F.pad(mask.flatten(), (0, delta.shape[1] - n)))
    return torch.stack(rows)
