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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import _set_fwd_grad_enabled

from ...._core.space import compute_dtype
from ....grams.kronecker.packed_matrix import FactorMatrix, get_entries, pack, pack_stacked, unpack
from ....maps.layers import AffineBlock, Layer
from ....maps.layers.moments import Moments, Sharing
from ....maps.layers.registry import LayerInput
from ....maps.layers.scale import Scale, UnitSums, compute_unit_moments
from ....maps.proof import Proof, arrange_use
from ....maps.record import Entry
from ..factors.block import SPECTRUM, UNITS, Bases, BlockKey
from .descent import Descent
from .plan import BlockPlan
from .sums import BIAS_OUTPUT, Pool, Sums, get_factor_keys

_HALF = (torch.float16, torch.bfloat16)
_ENGINE: Any = torch.autograd.Variable._execution_engine


@dataclass(frozen=True)
class _Limits:
    """Bounds on memory, in entries of tensors."""

    #: of a normalization's sums by sample that are kept until those of all uses are joined
    unit_sums: int = 2**18
    #: of the moments of inputs that are formed by one product, before they are packed
    input_moments: int = 2**26
    #: of inputs that are kept until their moments are formed together
    pending_inputs: int = 2**25
    #: relative difference of two sums that are taken for equal in half precision
    half_precision_error: float = 1e-3


_LIMITS = _Limits()

AllSums = Mapping[BlockKey, Sums]


@contextlib.contextmanager
def measurement_context(device: torch.device) -> Iterator[None]:
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
    #: what the moments `inputs` are formed of, until they are
    layer_input: LayerInput | None = None
    outputs: FactorMatrix | None = None
    #: Σδδᵀ for the bias
    bias_outputs: FactorMatrix | None = None
    #: sums by sample of gain and shift, until Σ rows rowsᵀ, (U, k, k), is formed of them
    rows: UnitSums | None = None
    units: Tensor | None = None
    #: second moments in the eigenbases of this block
    spectrum: Tensor | None = None
    basis: BlockKey | None = None


class CotangentPass:
    """One pass over the layers of a recorded forward pass.

    `layouts` say where the samples of each use stand, `diagonals` are parameters held so, and
    `bases` eigenbases for second moments of the gradient. A `proof` receives all cotangents.
    """

    def __init__(
        self,
        descent: Descent,
        layouts: Sequence[str],
        diagonals: Collection[str],
        bases: Mapping[BlockKey, Bases],
        proof: Proof | None = None,
    ) -> None:
        self.descent = descent
        self._entries = descent.forward.record.entries
        self._layouts = layouts
        self._diagonals = diagonals
        self._proof = proof
        #: by use, the eigenbases of its block, where it is the block's only use
        self._bases: dict[int, tuple[BlockKey, Bases]] = {}
        keys = {key.names[0]: key for key in bases if key.is_kronecker and not key.is_bias}
        weights = [entry.names.get("weight") for entry in self._entries]
        for i, weight in enumerate(weights):
            if weight in keys and weights.count(weight) == 1:
                self._bases[i] = (keys[weight], bases[keys[weight]])
        #: by use of a layer that the covector reached
        self.uses: dict[int, UseMoments] = {}
        #: the cotangents at compound layers, and the gradients of the parameters asked for
        self.cotangents: list[Tensor | None] = []
        self.gradients: dict[str, Tensor | None] = {}

    @property
    def reached_uses(self) -> tuple[Any, ...]:
        """Which uses of layers, and which outputs of compound ones, the covector reached."""
        return (*sorted(self.uses), *(delta is not None for delta in self.cotangents))

    def run(self, last_uses: Sequence[int], names: Sequence[str]) -> None:
        """Pull the covector back to parameters of these names, and measure all uses of layers.

        `last_uses` are those below which there is no other; empty where `names` are all parameters.
        """
        forward = self.descent.forward
        compound_edges = forward.compound_edges
        leaves = [forward.leaves[name] for name in names]
        targets = [*(forward.edges[i] for i in last_uses), *compound_edges, *leaves]
        uses = range(len(self._entries))
        pulled_back = forward.pull(self.descent.covector, targets, uses, self.measure)
        first_gradient = len(last_uses) + len(compound_edges)
        self.cotangents = pulled_back[len(last_uses) : first_gradient]
        self.gradients = dict(zip(names, pulled_back[first_gradient:], strict=True))
        del pulled_back[len(last_uses) :]
        for i in reversed(last_uses):  # the first layers' cotangents are large, and not kept
            if (delta := pulled_back.pop()) is not None:
                self.measure(i, delta)
            del delta

    def measure(self, i: int, delta: Tensor) -> None:
        """Measure one use at its cotangent, once."""
        if i in self.uses:
            return
        entry = self._entries[i]
        thread = self.descent.thread
        use = UseMoments(entry, self.descent.find_sharing(entry, self._layouts[i]))
        self.uses[i] = use
        if thread is None:
            self._measure_use(i, use, delta)
        else:
            thread.do(partial(self._measure_use, i, use, delta), delta)

    def _measure_use(self, i: int, use: UseMoments, delta: Tensor) -> None:
        """Add the use to the proof, and form its moments if it has a block of its own."""
        entry = use.entry
        if self._proof is not None:
            self._proof.add_use(entry, delta)
        names_by_role = {role: name for role, name in entry.names.items() if name is not None}
        if not delta.numel() or self._are_diagonals(names_by_role.values()):
            return
        if isinstance(entry.layer, Scale):
            self._measure_units(use, delta, list(names_by_role))
            return
        self._measure_factors(use, delta, names_by_role)
        if i in self._bases and (use.sharing.layout is not None or not self._layouts[i]):
            use.basis, bases = self._bases[i]
            use.spectrum = _compute_squares(bases, use, delta)

    def _are_diagonals(self, names: Iterable[str]) -> bool:
        """Return True if all of these parameters are held as diagonals."""
        return all(name in self._diagonals for name in names)

    def _measure_units(self, use: UseMoments, delta: Tensor, roles: list[str]) -> None:
        """Form the sums of gain and shift by sample, or their moments at once if they are large."""
        entry = use.entry
        layer = entry.layer
        coupling = self.descent.coupling
        assert isinstance(layer, Scale)
        if coupling is not None:
            use.units = coupling.compute_unit_moments(entry, delta, roles, use.sharing)
            return
        use.rows = layer.compute_unit_sums(
            entry.module, entry.input, delta, roles, use.sharing, entry.normalization
        )
        if use.rows.shape.numel() > _LIMITS.unit_sums:
            _compute_pending_unit_moments([use])

    def _measure_factors(self, use: UseMoments, delta: Tensor, roles: Collection[str]) -> None:
        """Form the moments of inputs and outputs of a layer with weight or bias."""
        entry = use.entry
        layer = entry.layer
        x = entry.input
        if x.dtype != delta.dtype and delta.dtype in _HALF and x.is_floating_point():
            x = x.to(delta.dtype)  # as the layer itself saw it
        if self.descent.coupling is not None:
            x, delta = self.descent.coupling.whiten_use(entry, delta, use.sharing)
        if "weight" in roles:
            if self.descent.adds_inputs:
                self._measure_inputs(use, x, delta)
            use.outputs = pack(layer.output_moment(entry.module, x, delta, use.sharing))
        if "bias" in roles:
            if layer.joint and use.outputs is not None:
                use.bias_outputs = use.outputs
            else:
                use.bias_outputs = layer.bias_moment(entry.module, x, delta, use.sharing)

    def _measure_inputs(self, use: UseMoments, x: Tensor, delta: Tensor) -> None:
        """Form the moments of the inputs x, or keep x where this is done for several uses."""
        entry = use.entry
        layer = entry.layer
        descent = self.descent
        if descent.coupling is not None:
            use.inputs = descent.coupling.compute_input_moments(entry, x, use.sharing)
            return
        counted = None
        if descent.counted is not None:
            counted = layer.counted_positions(entry.module, x, delta, descent.counted)
        if x.device.type == "cpu":
            use.inputs = layer.input_moments(entry.module, x, use.sharing, counted)
        else:
            use.layer_input = LayerInput(entry.module, x, counted)

    def add_to(self, pool: Pool, plan: BlockPlan) -> None:
        """Add what was measured to the blocks of the plan."""
        uses = [use for _, use in sorted(self.uses.items())]
        _compute_pending_unit_moments(uses)
        with_weight_block = [u for u in uses if plan.weight_block(u.entry.names) is not None]
        compute_pending_input_moments(with_weight_block)
        for use in uses:
            if use.units is not None:
                _add_units(pool, plan, use, use.units)
                continue
            if use.outputs is not None:
                _add_weight(pool, plan, use, use.outputs)
            bias_key = plan.bias_block(use.entry.names)
            if use.bias_outputs is not None and bias_key is not None:
                pool.of(bias_key).add(BIAS_OUTPUT, pack(unpack(use.bias_outputs).clone()))


def _add_units(pool: Pool, plan: BlockPlan, use: UseMoments, units: Tensor) -> None:
    """Add the moments of gain and shift to their blocks: one for both, or one for each."""
    for key, indices in plan.unit_blocks(use.entry.names).items():
        if len(indices) == units.shape[-1]:
            pool.of(key).add(UNITS, units)
        else:
            pool.of(key).add(UNITS, units[:, indices][:, :, indices])


def _add_weight(pool: Pool, plan: BlockPlan, use: UseMoments, outputs: FactorMatrix) -> None:
    """Add the moments of inputs and outputs to the block of the weight, if it has one."""
    key = plan.weight_block(use.entry.names)
    if key is None:
        return
    block_sums = pool.of(key)
    input_factor, output_factor = get_factor_keys(use.entry.layer, key)
    if use.inputs is not None:
        block_sums.add(input_factor, use.inputs)
    block_sums.add(output_factor, outputs)
    if use.spectrum is not None and use.basis == key:
        block_sums.add(SPECTRUM, use.spectrum)


class UserPass:
    """Measures the layers along the user's backward pass, and calls `finish` at its end.

    With fisher="empirical" a second pass would repeat the loss's own cotangents, up to a sign per
    sample: hooks before the layers' nodes see them for nothing. The pass under way owns what they
    add up, by a callback at its end, and the hooks know it weakly: one that fails leaves nothing
    behind. The descent's root is the node whose hook runs now, its covector the cotangent there,
    which is let go.
    """

    def __init__(
        self, cotangent_pass: CotangentPass, finish: Callable[[CotangentPass], None]
    ) -> None:
        descent = cotangent_pass.descent
        self._cotangent_pass = cotangent_pass
        self._finish = finish
        self._entries = descent.forward.record.entries
        self._task = torch._C._current_graph_task_id()
        self._versions = [entry.input._version for entry in self._entries]
        #: uses whose inputs are kept until their moments are formed, and the inputs' entries
        self._pending: list[UseMoments] = []
        self._pending_entries = 0
        self._handles: list[Any] = []
        for i, edge in enumerate(descent.forward.edges):
            if edge == descent.forward.root:
                self._measure(i, descent.covector)
            else:
                hook = partial(_observe, weakref.ref(self), i, edge.output_nr)
                self._handles.append(edge.node.register_prehook(hook))
        # an empty one of the same shape, since the covector may be large
        descent.covector = descent.covector.new_empty(()).expand(descent.covector.shape)
        _ENGINE.queue_callback(self._end)

    def _measure(self, i: int, delta: Tensor) -> None:
        """Measure one use and let go of its input, which the pass under way frees too."""
        entry = self._entries[i]
        if entry.input._version != self._versions[i]:  # overwritten meanwhile
            return
        if torch._C._current_graph_task_id() != self._task:  # a pass inside of a user's hook
            return
        with measurement_context(delta.device):
            self._cotangent_pass.measure(i, delta)
            entry.input = entry.input.new_empty(0)
            use = self._cotangent_pass.uses[i]
            if use.layer_input is not None:
                self._pending.append(use)
                self._pending_entries += use.layer_input.input.numel()
            if self._pending_entries > _LIMITS.pending_inputs:
                compute_pending_input_moments(self._pending)
                self._pending = []
                self._pending_entries = 0

    def _end(self) -> None:
        """Remove the hooks and hand over the sums, when the user's pass is over."""
        for handle in self._handles:
            handle.remove()
        with measurement_context(self._cotangent_pass.descent.covector.device):
            self._finish(self._cotangent_pass)


def _observe(
    user_pass: weakref.ref[UserPass],
    i: int,
    output_number: int,
    cotangents: Sequence[Tensor | None],
) -> None:
    """Measure use i at the cotangent that its node receives, while the user's pass is under way."""
    live_pass = user_pass()
    delta = cotangents[output_number]
    if live_pass is not None and delta is not None:
        live_pass._measure(i, delta)


def are_sums_equal(descent: Descent, actual: AllSums, expected: AllSums) -> bool:
    """Return True if the sums are equal, up to round-off in the layers' precision."""
    is_half = any(entry.input.dtype in _HALF for entry in descent.forward.record.entries)
    for key, block_sums in actual.items():
        for factor, actual_matrix in block_sums.values.items():
            actual_entries = get_entries(actual_matrix)
            entries = get_entries(expected[key].values[factor])
            if is_half:
                tolerance = _LIMITS.half_precision_error
            else:
                tolerance = torch.finfo(entries.dtype).eps ** 0.8
            if actual_entries.shape != entries.shape:
                return False
            if not (actual_entries - entries).norm() <= tolerance * entries.norm():
                return False
    return True


def _compute_pending_unit_moments(uses: Sequence[UseMoments]) -> None:
    """Compute Σ rows rowsᵀ of all uses whose rows wait for it, of one join key at once."""
    batches: dict[Any, list[UseMoments]] = {}
    for use in uses:
        if use.rows is not None:
            batches.setdefault(use.rows.join_key, []).append(use)
    for batch in batches.values():
        moments = compute_unit_moments([use.rows for use in batch if use.rows is not None])
        for use, units in zip(batch, moments, strict=True):
            use.rows = None
            use.units = units


def compute_pending_input_moments(uses: Sequence[UseMoments]) -> None:
    """Compute Σ āāᵀ of all uses whose inputs wait for it, of one layer and shape at once."""
    batches: dict[Any, list[UseMoments]] = {}
    for use in uses:
        if use.layer_input is not None:
            x = use.layer_input.input
            batch_key = (use.entry.layer, use.sharing, x.shape, x.dtype)
            batches.setdefault(batch_key, []).append(use)
    for (layer, sharing, shape, _), batch in batches.items():
        size = len(batch)
        if shape:
            size = max(1, _LIMITS.input_moments // shape[-1] ** 2)
        for start in range(0, len(batch), size):
            _compute_batch(layer, sharing, batch[start : start + size])


def _compute_batch(layer: Layer, sharing: Sharing, uses: Sequence[UseMoments]) -> None:
    """Compute Σ āāᵀ of uses of one layer and shape by one product, and let their inputs go."""
    layer_inputs = [use.layer_input for use in uses if use.layer_input is not None]
    moments_by_use = layer.input_moments_of_uses(layer_inputs, sharing)
    packed = pack_stacked([moments.second for moments in moments_by_use])
    for use, moments, second in zip(uses, moments_by_use, packed, strict=True):
        use.layer_input = None
        use.inputs = replace(moments, second=second)


def _compute_squares(bases: Bases, use: UseMoments, delta: Tensor) -> Tensor | None:
    """Return the second moments of a use's gradients in eigenbases; None if it is not affine."""
    assert use.basis is not None
    names: dict[str, str | None] = {}
    for role, name in use.entry.names.items():
        names[role] = name if name in use.basis.names else None
    block = use.entry.layer.block(names, [arrange_use(use.entry, delta, use.sharing)])
    if not isinstance(block, AffineBlock):
        return None
    left = _convert(bases.left, delta)
    right = _convert(bases.right, delta)
    if block.is_transposed == use.basis.is_transposed:
        return block.squares(left, right)
    return block.squares(right, left).mT  # the weight's rows belong to the input


def _convert(basis: Tensor | None, delta: Tensor) -> Tensor | None:
    """Return a basis on the device of δ, in the precision in which δ is computed with."""
    if basis is None:
        return None
    return basis.to(delta.device, compute_dtype(delta.dtype))
