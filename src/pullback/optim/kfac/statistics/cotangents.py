r"""One covector sent down the graph: every layer's moments are taken while its cotangent passes.

The cotangents of all layers together take as much memory as the activations, so none is kept: a
hook before each layer's node adds up Σ δδᵀ and lets δ go. To make the engine run through all of
these nodes it suffices to ask for the cotangents at the *last* layers on the way, those below which
there is no other. On a GPU the inputs' Σ āāᵀ wait until the pass is over: layers of one shape are
then multiplied together, and the largest cotangents and moments are not there at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.graph import Root, pull
from ...._core.space import compute_dtype
from ....grams.kronecker.inverse import Inverse
from ....grams.kronecker.packed import Side, packed, whole
from ....maps.layers import AffineBlock, Block, Use
from ....maps.layers.moments import Moments, Sharing
from ....maps.layers.registry import Seen
from ....maps.layers.scale import Scale
from ....maps.layers.units import UnitSums, second_moments
from ....maps.proof import Proof
from ....maps.record import Entry
from ..factors.factor import BlockKey
from .coupling import Coupling
from .plan import Target
from .record import ForwardRecord
from .samples import sharing_of
from .sums import Pool

_HALF = (torch.float16, torch.bfloat16)
_FEW = 2**18  # entries of a normalization's sums that are finished together with those of others
_PIECE = 2**25  # entries of cotangents whose formula is evaluated at once


@dataclass
class Descent:
    """A covector at the output, and what it is pulled back to.

    Args:
        root: the output.
        covector: of the output's shape and dtype.
        record: the layers on the way.
        leaves: the parameters that take part.
        keep: which places of the output count.
        inputs: whether to add the inputs as well, once per forward pass.
        coupling: how the samples are related, where the metric does.
        unrelated: parameters held as diagonals since the samples cannot be related there, and why.
    """

    root: Root
    covector: Tensor
    record: ForwardRecord
    leaves: Mapping[str, Tensor]
    keep: Tensor | None
    inputs: bool
    coupling: Coupling | None
    unrelated: Mapping[str, str]

    @cached_property
    def edges(self) -> list[GradientEdge]:
        """Where cotangents are wanted: the layers' outputs, then those of compound layers."""
        return self.record.edges(None if isinstance(self.root, Tensor) else self.root.node)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What tells this way through the model from others, beside the sizes."""
        record = self.record
        return (
            tuple([e.site.mark for e in record.entries]),
            tuple([(c.path, c.note) for c in record.compounds]),
            tuple(self.leaves),
            tuple(self.unrelated.items()),
            record.nodes,
        )


@dataclass(slots=True)
class Met:
    """What one use of a layer met: sums over its places, whatever block they will belong to."""

    inputs: Moments | None = None
    #: what the layer saw and which of its places count, of which the moments are to be formed
    seen: tuple[Tensor, Tensor | None] | None = None
    outputs: Side | None = None
    shifts: Side | None = None
    #: sums by sample of gain and shift, until Σ rows rowsᵀ, (U, k, k), is formed of them
    rows: UnitSums | None = None
    units: Tensor | None = None
    #: second moments in the eigenbases of this block
    spectrum: Tensor | None = None
    basis: BlockKey | None = None


class CotangentPass:
    """One pass over the layers of a recorded forward pass.

    Args:
        descent: the covector and its way.
        targets: what each use of a layer is measured for.
        sharing: how places enter.
        samples: how many there are.
        bases: eigenbases of blocks, for second moments of the gradient in them.
        proof: told of every use and its cotangent, where the structure is yet to be proven.
    """

    def __init__(
        self,
        descent: Descent,
        targets: Sequence[Target],
        sharing: Sharing,
        samples: int,
        bases: Mapping[BlockKey, Inverse],
        proof: Proof | None,
    ) -> None:
        self._descent, self._entries, self._targets = descent, descent.record.entries, targets
        self._sharing, self._samples, self._proof = sharing, samples, proof
        self._basis = _basis_by_use(self._entries, bases)
        #: whether places need not be told apart by sample
        self._rows = descent.coupling is None and not self._basis and not sharing.reduce
        self.met: dict[int, Met] = {}

    def run(
        self, ends: Sequence[int], asked: Sequence[str]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Go down, past all layers if the `ends` below which there is no other are asked for.

        Returns:
            The cotangents at compound layers, and the gradients of the parameters `asked` for.
        """
        d, count = self._descent, len(self._entries)
        handles = [
            e.node.register_prehook(partial(self._before, i, e.output_nr))
            for i, e in enumerate(d.edges[:count])
        ]
        try:
            targets = [d.edges[i] for i in ends] + d.edges[count:] + [d.leaves[n] for n in asked]
            found = list(pull(d.root, d.covector, targets))
        finally:
            for handle in handles:
                handle.remove()
        rest = found[len(ends) :]
        del found[len(ends) :]
        for i in reversed(ends):  # the first layers' cotangents are large, and not kept
            if (delta := found.pop()) is not None:
                self._consume(i, delta)
            del delta
        middle = len(d.edges) - count
        return rest[:middle], rest[middle:]

    def _before(self, i: int, number: int, cotangents: Sequence[Tensor | None]) -> None:
        if (delta := cotangents[number]) is not None:
            self._consume(i, delta)

    def _consume(self, i: int, delta: Tensor) -> None:
        """Measure one use at its cotangent, once."""
        if i in self.met:
            return
        entry, target = self._entries[i], self._targets[i]
        self.met[i] = met = Met()
        if self._proof is not None:
            whole = delta.reshape(entry.shape)
            self._proof.add_use(entry, whole, _formula(entry, whole))
        if not target.wanted or not delta.numel():  # nothing is learned where no place is
            return
        # a linear layer gave a view of its rows, and these will do
        if not (self._rows and target.rows) and delta.shape != entry.shape:
            delta = delta.reshape(entry.shape)
        if target.layer.curvature == "units":
            self._measure_units(entry, target, delta, met)
        else:
            self._measure(entry, target, delta, met)

    def _measure_units(self, entry: Entry, target: Target, delta: Tensor, met: Met) -> None:
        """Gains and shifts."""
        layer, sharing, coupling = target.layer, self._shared(entry, target), self._descent.coupling
        assert isinstance(layer, Scale)
        if coupling is not None:
            met.units = coupling.units(entry, delta, target.roles, sharing)
            return
        found = layer.unit_sums(entry.module, entry.input, delta, target.roles, sharing)
        met.rows = found
        if found.shape.numel() > _FEW:
            _finish_units([met])

    def _measure(self, entry: Entry, target: Target, delta: Tensor, met: Met) -> None:
        """Both sides of a weight, and a bias."""
        module, layer, x = entry.module, target.layer, entry.input
        sharing, coupling = self._shared(entry, target), self._descent.coupling
        if x.dtype != delta.dtype and delta.dtype in _HALF and x.is_floating_point():
            x = x.to(delta.dtype)  # as the layer itself saw it
        if coupling is not None:
            x, delta = coupling.whitened_use(entry, delta, sharing)
        if "weight" in target.roles:
            if self._descent.inputs:
                self._measure_inputs(entry, target, x, delta, sharing, met)
            met.outputs = packed(layer.outputs(module, x, delta, sharing))
        if "bias" in target.roles:
            joint = layer.joint and met.outputs is not None
            met.shifts = met.outputs if joint else layer.shifts(module, x, delta, sharing)
        located = sharing.layout is not None or not target.layout
        if located and (found := self._basis.get(id(entry))) is not None:
            met.basis, basis = found
            block, _ = block_of_use(entry, delta, sharing, met.basis.names)
            if isinstance(block, AffineBlock):
                like = compute_dtype(delta.dtype)
                sides = [
                    None if t is None else t.to(delta.device, like)
                    for t in (basis.left, basis.right)
                ]
                met.spectrum = block.squares(*sides)

    def _measure_inputs(
        self, entry: Entry, target: Target, x: Tensor, delta: Tensor, sharing: Sharing, met: Met
    ) -> None:
        layer, module, keep = target.layer, entry.module, self._descent.keep
        if self._descent.coupling is not None:
            met.inputs = self._descent.coupling.inputs(entry, x, sharing)
            return
        keep = None if keep is None else layer.counted(module, x, delta, keep)
        if x.device.type == "cpu":
            met.inputs = layer.inputs(module, x, sharing, keep)
        else:
            met.seen = x, keep

    def add_to(self, pool: Pool, targets: Sequence[Target]) -> None:
        """Add what was met to the blocks it belongs to."""
        alike: dict[Any, list[Met]] = {}
        for met in self.met.values():
            if met.rows is not None:
                alike.setdefault(met.rows.kind, []).append(met)
        for some in alike.values():
            _finish_units(some)
        self._form_inputs(targets)
        for i, met in sorted(self.met.items()):
            target = targets[i]
            if met.units is not None:
                for key, at in target.units:
                    pool.of(key).add_squares(
                        met.units if at is None else met.units[:, at][:, :, at]
                    )
                continue
            if target.weights is not None and met.outputs is not None:
                held = pool.of(target.weights)
                if met.inputs is not None:
                    held.add_inputs(target.role, met.inputs)
                held.add_outputs(target.role, met.outputs)
                if met.spectrum is not None and met.basis == target.weights:
                    held.add_spectrum(met.spectrum)
            if target.biases is not None and met.shifts is not None:
                pool.of(target.biases).add_bias(whole(met.shifts).clone())

    def _form_inputs(self, targets: Sequence[Target]) -> None:
        """Σ āāᵀ of the uses that a block learns from, those of one kind and shape at once."""
        kinds: dict[Any, list[tuple[Met, Seen]]] = {}
        for i, met in sorted(self.met.items()):
            if met.seen is not None and targets[i].weights is not None:
                (x, keep), entry, layer = met.seen, self._entries[i], targets[i].layer
                kind = (layer, self._shared(entry, targets[i]), x.shape, x.dtype)
                kinds.setdefault(kind, []).append((met, (entry.module, x, keep)))
            met.seen = None
        for layer, sharing, *rest in list(kinds):
            some = kinds.pop((layer, sharing, *rest))
            found = layer.inputs_of([use for _, use in some], sharing)
            for (met, _), moments in zip(some, found, strict=True):
                met.inputs = replace(moments, second=packed(moments.second))

    def _shared(self, entry: Entry, target: Target) -> Sharing:
        """How the places of this use enter."""
        if not target.layout:
            return self._sharing
        return sharing_of(self._sharing, target.layout, entry, self._samples)


def _basis_by_use(
    entries: Sequence[Entry], bases: Mapping[BlockKey, Inverse]
) -> dict[int, tuple[BlockKey, Inverse]]:
    """The eigenbases of a use's block, where it is the block's only use, by the entry's id."""
    by_weight = {k.names[0]: k for k in bases if k.kronecker and not k.bias}
    uses: dict[str, list[Entry]] = {}
    for entry in entries if by_weight else ():
        uses.setdefault(entry.names.get("weight") or "", []).append(entry)
    return {
        id(own[0]): (by_weight[name], bases[by_weight[name]])
        for name, own in uses.items()
        if name in by_weight and len(own) == 1
    }


def _finish_units(some: Sequence[Met]) -> None:
    """Σ rows rowsᵀ of all units at once."""
    found = second_moments([met.rows for met in some if met.rows is not None])
    for met, own in zip(some, found, strict=True):
        met.rows, met.units = None, own


def block_of_use(
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


def _formula(entry: Entry, delta: Tensor) -> dict[str, Tensor]:
    """The gradients that the layer's own formula gives for its cotangents, by name."""
    if not delta.numel():  # no places, no share in the gradient
        held = zip(entry.names.values(), entry.site.held, strict=True)
        return {n: p.new_zeros(p.numel()) for n, p in held if n is not None and p is not None}
    out: dict[str, Tensor] = {}
    for x, d in _pieces(entry, delta):
        every = set(entry.names.values())
        block, samples = block_of_use(replace(entry, input=x), d, Sharing(), every)
        ones = d.new_ones(samples, 1, dtype=compute_dtype(d.dtype))
        for name, value in block.lift(ones).items():
            out[name] = out[name] + value if name in out else value
    return out


def _pieces(entry: Entry, delta: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The use, some samples at a time where it is large; batch norms need all of them."""
    whole = entry.layer.curvature == "units" or delta.ndim == entry.features
    if whole or delta.numel() <= _PIECE or len(entry.input) != len(delta):
        yield entry.input, delta
        return
    step = max(1, _PIECE * len(delta) // delta.numel())
    yield from zip(entry.input.split(step), delta.split(step), strict=True)
