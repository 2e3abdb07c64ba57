r"""One covector sent down the graph: every layer's moments are taken while its cotangent passes.

The cotangents of all layers together take as much memory as the activations, so none is kept: a
hook before each layer's node adds up Σ δδᵀ and lets δ go. To make the engine run through all of
these nodes it suffices to ask for the cotangents at the *last* layers on the way, those below which
there is no other. On a GPU the inputs' Σ āāᵀ wait until the pass is over: layers of one shape are
then multiplied together, and the largest cotangents and moments are not there at the same time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from ...._core.space import compute_dtype
from ....grams.kronecker.packed_matrix import FactorMatrix, get_entries, pack, pack_stacked, unpack
from ....maps.layers import AffineBlock, Block, Use
from ....maps.layers.moments import Moments, Sharing
from ....maps.layers.registry import LayerInput
from ....maps.layers.scale import Scale, UnitSums, compute_unit_moments
from ....maps.proof import Proof, accumulate
from ....maps.record import Entry
from ..factors.block import SPECTRUM, UNITS, Bases, BlockKey
from .covectors import Descent
from .plan import BlockPlan
from .sums import BIAS_OUTPUT, Pool, Sums, factors_of

_HALF = (torch.float16, torch.bfloat16)
_FEW = 2**18  # entries of a normalization's sums that are finished together with those of others
_AT_ONCE = 2**26  # entries of inputs' moments before they are packed
_PIECE = 2**25  # entries of cotangents whose formula is evaluated at once
_WAITING = 2**25  # entries of inputs that are held until their moments are formed together
_ENGINE: Any = torch.autograd.Variable._execution_engine

AllSums = Mapping[BlockKey, Sums]


@contextlib.contextmanager
def measuring(device: torch.device) -> Iterator[None]:
    """Compute without a graph, without tangents, and in the precision that tensors have."""
    no_autocast = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), _set_fwd_grad_enabled(False), no_autocast:
        yield


@dataclass(slots=True)
class UseMoments:
    """Sums over the positions of one use of a layer, whatever block they will belong to."""

    entry: Entry
    sharing: Sharing
    inputs: Moments | None = None
    #: what the layer saw and which of its positions count, of which the moments are to be formed
    seen: LayerInput | None = None
    outputs: FactorMatrix | None = None
    shifts: FactorMatrix | None = None
    #: sums by sample of gain and shift, until Σ rows rowsᵀ, (U, k, k), is formed of them
    rows: UnitSums | None = None
    units: Tensor | None = None
    #: second moments in the eigenbases of this block
    spectrum: Tensor | None = None
    basis: BlockKey | None = None


class CotangentPass:
    """One pass over the layers of a recorded forward pass.

    `layouts` say where the samples of each use stand, `plain` are parameters held as diagonals, and
    `bases` eigenbases for second moments of the gradient. A `proof` receives all cotangents.
    """

    def __init__(
        self,
        descent: Descent,
        layouts: Sequence[str],
        plain: Collection[str],
        bases: Mapping[BlockKey, Bases],
        proof: Proof | None = None,
    ) -> None:
        self.descent = descent
        self._entries = descent.record.entries
        self._layouts = layouts
        self._plain = plain
        self._proof = proof
        #: by use, the eigenbases of its block, where it is the block's only use
        names = [e.names.get("weight") for e in self._entries]
        keys = {k.names[0]: k for k in bases if k.kronecker and not k.bias}
        self._bases = {
            i: (keys[n], bases[keys[n]])
            for i, n in enumerate(names)
            if n in keys and names.count(n) == 1
        }
        #: by use of a layer that the covector reached
        self.uses: dict[int, UseMoments] = {}
        #: the cotangents at compound layers, and the gradients of the parameters asked for
        self.cotangents: list[Tensor | None] = []
        self.gradients: dict[str, Tensor | None] = {}

    @property
    def reached(self) -> tuple[Any, ...]:
        """Which uses of layers, and which ends of compound ones, the covector reached."""
        return (*sorted(self.uses), *(c is not None for c in self.cotangents))

    def run(self, ends: Sequence[int], names: Sequence[str]) -> None:
        """Go down to the parameters of these names, and past all layers.

        `ends` are the uses below which there is no other, where the parameters do not suffice.
        """
        d = self.descent
        count = len(self._entries)
        targets = [d.edges[i] for i in ends] + d.edges[count:] + [d.leaves[n] for n in names]
        found = d.pull(targets, range(count), self.measure)
        middle = len(ends) + len(d.edges) - count
        self.cotangents = found[len(ends) : middle]
        self.gradients = dict(zip(names, found[middle:], strict=True))
        del found[len(ends) :]
        for i in reversed(ends):  # the first layers' cotangents are large, and not kept
            if (delta := found.pop()) is not None:
                self.measure(i, delta)
            del delta

    def measure(self, i: int, delta: Tensor) -> None:
        """Measure one use at its cotangent, once."""
        if i in self.uses:
            return
        entry = self._entries[i]
        thread = self.descent.thread
        self.uses[i] = own = UseMoments(entry, self.descent.sharing_at(entry, self._layouts[i]))
        if thread is None:
            self._measure(i, own, delta)
        else:
            thread.do(partial(self._measure, i, own, delta), delta)

    def _measure(self, i: int, own: UseMoments, delta: Tensor) -> None:
        entry = own.entry
        sharing = own.sharing
        if self._proof is not None:
            self._proof.add_use(entry, delta, _formula(entry, delta))
        trained = {role: n for role, n in entry.names.items() if n is not None}
        if not delta.numel() or not any(n not in self._plain for n in trained.values()):
            return  # nothing is learned
        if isinstance(entry.layer, Scale):
            self._measure_units(own, delta, list(trained))
            return
        self._measure_sides(own, delta, trained)
        if i in self._bases and (sharing.layout is not None or not self._layouts[i]):
            own.basis, basis = self._bases[i]
            own.spectrum = _squares_in(basis, own, delta)

    def _measure_units(self, own: UseMoments, delta: Tensor, roles: list[str]) -> None:
        entry = own.entry
        layer = own.entry.layer
        coupling = self.descent.coupling
        assert isinstance(layer, Scale)
        if coupling is not None:
            own.units = coupling.units(entry, delta, roles, own.sharing)
            return
        given = entry.module, entry.input, delta, roles, own.sharing
        own.rows = layer.compute_unit_sums(*given, entry.normalization)
        if own.rows.shape.numel() > _FEW:
            _form_units([own])

    def _measure_sides(self, own: UseMoments, delta: Tensor, roles: Collection[str]) -> None:
        entry = own.entry
        sharing = own.sharing
        x = own.entry.input
        module = entry.module
        layer = entry.layer
        way = self.descent
        if x.dtype != delta.dtype and delta.dtype in _HALF and x.is_floating_point():
            x = x.to(delta.dtype)  # as the layer itself saw it
        if way.coupling is not None:
            x, delta = way.coupling.whitened_use(entry, delta, sharing)
        if "weight" in roles:
            if way.inputs and way.coupling is not None:
                own.inputs = way.coupling.inputs(entry, x, sharing)
            elif way.inputs:
                if way.keep is None:
                    keep = None
                else:
                    keep = layer.counted_positions(module, x, delta, way.keep)
                if x.device.type == "cpu":
                    own.inputs = layer.input_moments(module, x, sharing, keep)
                else:
                    own.seen = LayerInput(module, x, keep)
            own.outputs = pack(layer.output_moment(module, x, delta, sharing))
        if "bias" in roles:
            joint = layer.joint and own.outputs is not None
            if joint:
                own.shifts = own.outputs
            else:
                own.shifts = layer.bias_moment(module, x, delta, sharing)

    def add_to(self, pool: Pool, plan: BlockPlan) -> None:
        """Add what was measured to the blocks of the plan."""
        uses = [own for _, own in sorted(self.uses.items())]
        _form_units(uses)
        form_inputs([own for own in uses if plan.weight_block(own.entry.names) is not None])
        for own in uses:
            names = own.entry.names
            if own.units is not None:
                for key, at in plan.unit_blocks(names).items():
                    every = len(at) == own.units.shape[-1]
                    pool.of(key).add(UNITS, own.units if every else own.units[:, at][:, :, at])
                continue
            if own.outputs is not None and (key := plan.weight_block(names)) is not None:
                held = pool.of(key)
                inputs, outputs = factors_of(own.entry.layer, key)
                if own.inputs is not None:
                    held.add(inputs, own.inputs)
                held.add(outputs, own.outputs)
                if own.spectrum is not None and own.basis == key:
                    held.add(SPECTRUM, own.spectrum)
            if own.shifts is not None and (key := plan.bias_block(names)) is not None:
                pool.of(key).add(BIAS_OUTPUT, pack(unpack(own.shifts).clone()))


class UserPass:
    """Measures the layers along the user's backward pass, and calls `finish` at its end.

    With fisher="empirical" a second pass would repeat the loss's own cotangents, up to a sign per
    sample: hooks before the layers' nodes see them for nothing. The pass under way owns what they
    add up, by a callback at its end, and the hooks know it weakly: one that fails leaves nothing
    behind. The descent's root is the node whose hook runs now, its covector the cotangent there.
    """

    def __init__(self, down: CotangentPass, finish: Callable[[CotangentPass], None]) -> None:
        way = down.descent
        self._down = down
        self._finish = finish
        self._entries = way.record.entries
        self._task = torch._C._current_graph_task_id()
        self._versions = [entry.input._version for entry in self._entries]
        self._waiting: list[UseMoments] = []
        self._held = 0  # entries of the inputs that wait
        self._handles: list[Any] = []
        for i, edge in enumerate(way.edges):
            if edge == way.root:
                self._measure(i, way.covector)
            else:
                hook = partial(_observe, weakref.ref(self), i, edge.output_nr)
                self._handles.append(edge.node.register_prehook(hook))
        way.covector = way.covector.new_empty(()).expand(way.covector.shape)  # may be large
        _ENGINE.queue_callback(self._end)

    def _measure(self, i: int, delta: Tensor) -> None:
        """Measure one use and let go of its input, which the pass under way frees too."""
        entry = self._entries[i]
        if entry.input._version != self._versions[i]:  # overwritten meanwhile
            return
        if torch._C._current_graph_task_id() != self._task:  # a pass inside of a user's hook
            return
        with measuring(delta.device):
            self._down.measure(i, delta)
            entry.input = entry.input.new_empty(0)
            own = self._down.uses[i]
            if own.seen is not None:
                self._waiting.append(own)
                self._held += own.seen[1].numel()
            if self._held > _WAITING:
                form_inputs(self._waiting)
                self._waiting = []
                self._held = 0

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        with measuring(self._down.descent.covector.device):
            self._finish(self._down)


def _observe(
    held: weakref.ref[UserPass], i: int, number: int, cotangents: Sequence[Tensor | None]
) -> None:
    own = held()
    delta = cotangents[number]
    if own is not None and delta is not None:
        own._measure(i, delta)


def alike(way: Descent, found: AllSums, expected: AllSums) -> bool:
    """Whether both sums of squares are the same, up to round-off in the layers' precision."""
    half = any(entry.input.dtype in _HALF for entry in way.record.entries)
    for key, own in found.items():
        for factor, side in own.values.items():
            got = get_entries(side)
            want = get_entries(expected[key].values[factor])
            if half:
                limit = 1e-3
            else:
                limit = torch.finfo(want.dtype).eps ** 0.8
            if got.shape != want.shape or not (got - want).norm() <= limit * want.norm():
                return False
    return True


def _form_units(uses: Sequence[UseMoments]) -> None:
    """Form Σ rows rowsᵀ, of uses of one kind at once."""
    kinds: dict[Any, list[UseMoments]] = {}
    for own in uses:
        if own.rows is not None:
            kinds.setdefault(own.rows.join_key, []).append(own)
    for some in kinds.values():
        found = compute_unit_moments([own.rows for own in some if own.rows is not None])
        for own, units in zip(some, found, strict=True):
            own.rows = None
            own.units = units


def form_inputs(uses: Sequence[UseMoments]) -> None:
    """Form Σ āāᵀ, of uses of one kind and shape at once, so many that their matrices fit."""
    kinds: dict[Any, list[UseMoments]] = {}
    for own in uses:
        if own.seen is not None:
            x = own.seen[1]
            kinds.setdefault((own.entry.layer, own.sharing, x.shape, x.dtype), []).append(own)
    for (layer, sharing, shape, _), every in kinds.items():
        if shape:
            step = max(1, _AT_ONCE // shape[-1] ** 2)
        else:
            step = len(every)
        for some in (every[a : a + step] for a in range(0, len(every), step)):
            found = layer.input_moments_of_uses(
                [own.seen for own in some if own.seen is not None], sharing
            )
            second = pack_stacked([moments.second for moments in found])
            for own, moments, side in zip(some, found, second, strict=True):
                own.seen = None
                own.inputs = replace(moments, second=side)


def _block_of_use(
    entry: Entry, delta: Tensor, sharing: Sharing, wanted: Collection[str | None]
) -> tuple[Block, int]:
    """The block of rows of one use, and how many samples it has."""
    features = entry.layer.features(entry.module, delta.ndim)
    dtype = compute_dtype(delta.dtype)
    x = entry.input
    if x.is_floating_point():
        x = x.to(dtype)
    lead = delta.ndim - features
    if lead == 0:
        x = x[None]
        delta = delta[None]
    elif sharing.layout is not None:
        x = sharing.layout(x)
        delta = sharing.layout(delta)
    elif lead > 1:
        x = x.movedim(sharing.batch_dim, 0)
        delta = delta.movedim(sharing.batch_dim, 0)
    names = {r: n if n in wanted else None for r, n in entry.names.items()}
    use = Use(entry.module, x, delta.to(dtype)[:, None], features)
    return entry.layer.block(names, [use]), len(delta)


def _squares_in(basis: Bases, own: UseMoments, delta: Tensor) -> Tensor | None:
    """Second moments of a use's gradients in these eigenbases."""
    assert own.basis is not None
    block = _block_of_use(own.entry, delta, own.sharing, own.basis.names)[0]
    if not isinstance(block, AffineBlock):
        return None
    like = delta.device, compute_dtype(delta.dtype)
    sides = [None if t is None else t.to(*like) for t in (basis.left, basis.right)]
    if block.is_transposed == own.basis.turned:
        return block.squares(*sides)
    return block.squares(*sides[::-1]).mT  # the weight's rows belong to the input


def _formula(entry: Entry, delta: Tensor) -> dict[str, Tensor]:
    """The gradients that the layer's own formula gives for its cotangents, by name.

    Some samples at a time where there are many positions; batch norms need all of them.
    """
    if not delta.numel():  # no positions, no share in the gradient
        held = zip(entry.names.values(), entry.site.parameters, strict=True)
        return {n: p.new_zeros(p.numel()) for n, p in held if n is not None and p is not None}
    out: dict[str, Tensor] = {}
    pieces = [(entry.input, delta)]
    together = entry.layer.curvature == "units" or delta.ndim == entry.features
    if not together and delta.numel() > _PIECE and len(entry.input) == len(delta):
        step = max(1, _PIECE * len(delta) // delta.numel())
        pieces = zip(entry.input.split(step), delta.split(step), strict=True)
    for x, d in pieces:
        every = set(entry.names.values())
        block, samples = _block_of_use(replace(entry, input=x), d, Sharing(), every)
        ones = d.new_ones(samples, 1, dtype=compute_dtype(d.dtype))
        accumulate(out, block.lift(ones))
    return out
