r"""One covector sent down the graph: every layer's moments are taken while its cotangent passes.

The cotangents of all layers together take as much memory as the activations, so none is kept: a
hook before each layer's node has Σ δδᵀ added up and lets δ go (on a GPU small ones wait for others
like them). To make the engine run through all of these nodes it suffices to ask for the cotangents
at the *last* layers on the way, those below which there is no other. On a GPU the inputs' Σ āāᵀ
wait until the pass is over, and its cotangents with it: the first layers' are the largest, and the
last layers' moments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.space import compute_dtype
from ....maps.layers import AffineBlock, Block, Use
from ....maps.layers.moments import Moments, Sharing, product_into
from ....maps.layers.registry import Seen
from ....maps.layers.scale import Scale
from ....maps.layers.units import UnitSums, second_moments
from ....maps.record import Entry
from ..blocks.inverse import Inverse
from .aims import Aim
from .aside import Aside
from .beside import Beside
from .coupling import Coupling
from .samples import shared
from .sums import Key, Sums, add_bias, held_by
from .waiting import Waiting

_HALF = (torch.float16, torch.bfloat16)
_FEW = 2**18  # entries of a normalization's sums that may wait for those of others


@dataclass(slots=True)
class Met:
    """What one use of a layer met: sums over its places, whatever block they will belong to."""

    inputs: Moments | None = None
    #: what the layer saw and which of its places count, of which the moments are to be formed
    seen: tuple[Tensor, Tensor | None] | None = None
    outputs: Tensor | None = None
    shifts: Tensor | None = None
    #: sums by sample of gain and shift, until Σ rows rowsᵀ, (U, k, k), is formed of them
    rows: UnitSums | None = None
    units: Tensor | None = None
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
        aims: what each use is measured for.
        basis: eigenbases for the second moments of a use's gradients, or None.
        proof: told of every use and its cotangent, where the structure is yet to be proven.
        coupling: how the samples are related, where the metric does.
        samples: how many there are.
        aside: who measures, while the covector goes on.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        sharing: Sharing,
        keep: Tensor | None,
        *,
        inputs: bool,
        aims: Sequence[Aim],
        basis: Callable[[Entry], tuple[Key, Inverse] | None] | None,
        proof: Callable[[Entry, Tensor], None] | None,
        coupling: Coupling | None = None,
        samples: int = 0,
        aside: Aside | None = None,
    ) -> None:
        self._entries, self._sharing, self._keep = entries, sharing, keep
        self._samples, self._aside = samples, Aside() if aside is None else aside
        self._inputs, self._aims, self._basis, self._proof = inputs, aims, basis, proof
        self._coupling, self._waiting = coupling, Waiting(sharing)
        plain = coupling is None and not sharing.reduce
        self._beside = Beside(entries, aims, sharing) if plain else None
        #: whether places need not be told apart by sample
        self._rows = coupling is None and basis is None and not sharing.reduce
        self.met: dict[int, Met] = {}

    def hooks(self, edges: Sequence[GradientEdge]) -> list[Any]:
        """Stand before the layers' nodes; the handles are to be removed."""
        before = self._before
        return [
            e.node.register_prehook(partial(before, i, e.output_nr)) for i, e in enumerate(edges)
        ]

    def _before(self, i: int, number: int, cotangents: Sequence[Tensor | None]) -> None:
        if (delta := cotangents[number]) is not None:
            self.consume(i, delta)

    def consume(self, i: int, delta: Tensor) -> None:
        """The cotangent of one use, once; without gradients and autocast, as the pass itself."""
        if i in self.met:
            return
        entry, aim = self._entries[i], self._aims[i]
        self.met[i] = met = Met()
        if self._proof is not None:
            self._proof(entry, delta.reshape(entry.shape))
        if aim.wanted and delta.numel():  # nothing is learned where no place is
            self._aside.do(partial(self._learn, i, delta, met), delta)

    def _learn(self, i: int, delta: Tensor, met: Met) -> None:
        entry, aim = self._entries[i], self._aims[i]
        # a linear layer gave a view of its rows, and these will do
        if not (self._rows and aim.rows) and delta.shape != entry.shape:
            delta = delta.reshape(entry.shape)
        if aim.layer.curvature == "units":
            self._measure_units(entry, aim, delta, met)
        else:
            room = None if self._beside is None else self._beside.place(i, delta)
            self._measure(entry, aim, delta, met, room)

    def _measure_units(self, entry: Entry, aim: Aim, delta: Tensor, met: Met) -> None:
        """Gains and shifts."""
        layer, sharing, site = aim.layer, self._shared(entry, aim), entry.site
        assert isinstance(layer, Scale)
        if self._coupling is not None:
            met.units = self._coupling.units(entry, delta, aim.roles, sharing)
            return
        met.rows = layer.unit_sums(site.module, entry.input, delta, aim.roles, sharing, entry.kept)
        if met.rows.shape.numel() > _FEW:
            _form([met])

    def _measure(
        self, entry: Entry, aim: Aim, delta: Tensor, met: Met, room: Tensor | None
    ) -> None:
        """Both sides of a weight and a bias, the outputs' in memory that may be given."""
        module, layer, x = entry.site.module, aim.layer, entry.input
        sharing = self._sharing if not aim.layout else self._shared(entry, aim)
        coupling, dtype, keep = self._coupling, delta.dtype, self._keep
        if x.dtype != dtype and dtype in _HALF and x.is_floating_point():
            x = x.to(dtype)  # as the layer itself saw it
        if coupling is not None:
            x, delta = coupling.prepared(entry, delta, sharing)
        if aim.weight:
            if self._inputs and coupling is not None:
                met.inputs = coupling.inputs(entry, x, sharing)
            elif self._inputs:
                keep = None if keep is None else layer.counted(module, x, delta, keep)
                if waits(x):
                    met.seen = x, keep
                else:
                    met.inputs = layer.inputs(module, x, sharing, keep)
            if not aim.bias and layer.waits(module, delta, sharing):
                self._waiting.add(layer, met, delta)
            elif room is not None:
                product_into(room[0], delta.reshape(-1, delta.shape[-1]))
                met.outputs = room
            else:
                self._waiting.make_room(delta)
                met.outputs = layer.outputs(module, x, delta, sharing)
        if aim.bias:
            joint = layer.joint and met.outputs is not None
            met.shifts = met.outputs if joint else layer.shifts(module, x, delta, sharing)
        apart = sharing.layout is not None or not aim.layout
        if self._basis is not None and apart and (found := self._basis(entry)) is not None:
            key, basis = found
            met.basis = key
            block, _ = block_of(entry, delta, sharing, key.names)
            if isinstance(block, AffineBlock):
                basis = basis.moved(delta.device, compute_dtype(delta.dtype))
                met.squares = block.squares(basis.left, basis.right)

    def assign(self, aims: Sequence[Aim], sums: dict[Key, Sums], spent: list[Entry] | None) -> None:
        """Add what was met to the blocks it belongs to; `spent` entries are not needed any more."""
        self._waiting.form()
        alike: dict[Any, list[Met]] = {}
        for met in self.met.values():
            if met.rows is not None:
                alike.setdefault(met.rows.kind, []).append(met)
        for some in alike.values():
            _form(some)
        order = [(aims[i], met) for i, met in sorted(self.met.items())]
        self._form_inputs(aims, spent)
        for aim, met in order:
            if met.units is not None:
                for key, at in aim.units:
                    units = met.units if at is None else met.units[:, at][:, :, at]
                    held_by(sums, key).add_squares(units)
                continue
            if aim.weights is not None and met.outputs is not None:
                held = held_by(sums, aim.weights)
                if met.inputs is not None:
                    held.add_inputs(aim.term, met.inputs)
                held.add_outputs(aim.term, met.outputs)
                if met.squares is not None and met.basis == aim.weights:
                    held.add_squares(met.squares)
            if aim.biases is not None and met.shifts is not None:
                shared = met.shifts is met.outputs
                add_bias(held_by(sums, aim.biases), met.shifts.clone() if shared else met.shifts)

    def _form_inputs(self, aims: Sequence[Aim], spent: list[Entry] | None) -> None:
        """Σ āāᵀ of the uses that a block learns from, those of one kind and shape at once.

        From the last layers on, as the backward pass that may go on beside lets go of them, too.
        """
        kinds: dict[Any, list[tuple[Met, Seen]]] = {}
        for i, met in sorted(self.met.items(), reverse=True):
            if met.seen is not None and aims[i].weights is not None:
                (x, keep), entry, layer = met.seen, self._entries[i], aims[i].layer
                kind = (layer, self._shared(entry, aims[i]), x.shape, x.dtype)
                kinds.setdefault(kind, []).append((met, (entry.site.module, x, keep)))
            met.seen = None
        if spent is not None:
            spent.clear()
        for layer, sharing, *rest in list(kinds):
            some = kinds.pop((layer, sharing, *rest))[::-1]
            found = layer.inputs_of([use for _, use in some], sharing)
            for (met, _), moments in zip(some, found, strict=True):
                met.inputs = moments

    def _shared(self, entry: Entry, aim: Aim) -> Sharing:
        """How the places of this use enter."""
        if not aim.layout:
            return self._sharing
        return shared(self._sharing, aim.layout, entry, self._samples)


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
    elif sharing.layout is not None:
        x, delta = sharing.layout(x), sharing.layout(delta)
    elif lead > 1:
        x, delta = x.movedim(sharing.batch_dim, 0), delta.movedim(sharing.batch_dim, 0)
    names = {r: n if n in wanted else None for r, n in entry.names.items()}
    use = Use(entry.module, x, delta.to(dtype)[:, None], features)
    return entry.layer.block(names, [use]), len(delta)
