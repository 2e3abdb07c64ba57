"""The affine maps inside compound layers, replayed with the cotangents at the layer's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

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
#: a call of a compound layer with the cotangents at its outputs, None where there is no gradient
CallCotangents = tuple[CompoundCall, list[Tensor | None]]


class CompoundReplays:
    """The compound layers of one pass, with the cotangents at all their outputs in the graph.

    Where the metric relates samples their parameters are held as diagonals, and none is replayed.
    """

    def __init__(self, descent: Descent, cotangents: Sequence[Tensor | None]) -> None:
        self._descent = descent
        self._calls: list[CallCotangents] = []
        if descent.coupling is not None:
            return
        remaining = iter(cotangents)
        for call in descent.record.compounds:
            call_cotangents = [None if edge is None else next(remaining) for edge in call.edges]
            if any(delta is not None for delta in call_cotangents):
                self._calls.append((call, call_cotangents))

    def _replay_calls(self) -> Iterator[tuple[CompoundCall, Maps]]:
        """Yield every call with its maps; those of one are gone when the next is replayed."""
        for call, cotangents in self._calls:
            yield call, _replay(call, cotangents)

    def _name_parameters(self, tap: Tap) -> dict[str, str | None]:
        """Return the names of a map's weight and bias; None for what is not trained."""
        name = self._descent.record.name
        return {"weight": name(tap.weight), "bias": name(tap.bias)}

    @property
    def uses(self) -> list[LayerUse]:
        """The maps, as a plan of blocks sees them."""
        uses: list[LayerUse] = []
        for _, maps in self._replay_calls():
            for tap, _ in maps:
                uses.append(LayerUse(self._name_parameters(tap), "kronecker", True, tap.form))
        return uses

    @property
    def remarks(self) -> dict[str, str]:
        """By parameter, what `coverage` says if the layer did not do what its replay does."""
        remarks: dict[str, str] = {}
        for call, _ in self._list_calls_with_dropout():
            text = f"{type(call.module).__name__}, replayed without {call.note}"
            remarks |= dict.fromkeys(self._find_trained_parameters(call), text)
        return remarks

    def _list_calls_with_dropout(self) -> list[CallCotangents]:
        """Return the calls whose replay leaves dropout out."""
        return [(call, cotangents) for call, cotangents in self._calls if call.note]

    def _find_trained_parameters(self, call: CompoundCall) -> dict[str, Tensor]:
        """Return the parameters of a layer that take part in the pass, by name."""
        name = self._descent.record.name
        parameters = {name(parameter): parameter for parameter in call.module.parameters()}
        return {n: parameter for n, parameter in parameters.items() if n is not None}

    def prove(self, proof: Proof) -> None:
        """Add the gradients that the maps give to the proof.

        Layers with dropout are proven by themselves: their replay is compared with a run of the
        layer without dropout.
        """
        self._prove_dropout_layers(proof)
        for _, maps in self._replay_calls():
            # what cancels inside a layer, before q and k where there is one key, leaves round-off
            largest = torch.stack([norm(delta) for _, delta in maps]).amax()
            for tap, delta in maps:
                inputs = torch.cat(tap.inputs, 1)
                names = self._name_parameters(tap)
                gradients: dict[str, Tensor] = {}
                if names["weight"] is not None:
                    gradients[names["weight"]] = delta.mT @ inputs
                if names["bias"] is not None:
                    gradients[names["bias"]] = delta.sum(1)
                proof.add(gradients, largest, norm(inputs), delta.numel())

    def _prove_dropout_layers(self, proof: Proof) -> None:
        """Add the gradients that layers with dropout give without it, each layer by itself."""
        calls = self._list_calls_with_dropout()
        gradients: dict[str, Tensor] = {}
        for call, cotangents in calls:
            accumulate(gradients, self._pull_without_dropout(call, cotangents))
        nodes_outside = set()
        if gradients:
            subgraphs = [(call.edges, call.below) for call, _ in calls]
            nodes_outside = find_nodes_reached_outside(self._descent.root, subgraphs)
        leaves = self._descent.leaves
        used_outside = {n for n in gradients if get_gradient_edge(leaves[n]).node in nodes_outside}
        proof.add_isolated(gradients, used_outside)

    def _pull_without_dropout(
        self, call: CompoundCall, cotangents: Sequence[Tensor | None]
    ) -> dict[str, Tensor]:
        """Return the gradients of a layer's parameters, by name, when it runs without dropout."""
        outputs = call.compound.run_without_dropout(call.module, call.args, call.kwargs)
        parameters = self._find_trained_parameters(call)
        gradients = _pull(outputs, list(parameters.values()), cotangents)
        named_gradients = zip(parameters, gradients, strict=True)
        return {name: gradient for name, gradient in named_gradients if gradient is not None}

    def add_to(self, pool: Pool, plan: BlockPlan) -> None:
        """Add the moments to the blocks of the plan."""
        sharing = self._descent.sharing
        for call, maps in self._replay_calls():
            for tap, delta in maps:
                if not any(tap.positions):
                    continue
                names = self._name_parameters(tap)
                output_moment = pack(compute_second_moment(delta, sharing))
                if (key := plan.weight_block(names)) is not None:
                    input_factor, output_factor = factors_of(call.compound, key)
                    if self._descent.inputs:
                        mask = self._find_mask(tap, delta)
                        pool.of(key).add(input_factor, tap_moments(tap, sharing, mask))
                    pool.of(key).add(output_factor, output_moment)
                if (key := plan.bias_block(names)) is not None:
                    pool.of(key).add(BIAS_OUTPUT, pack(unpack(output_moment).clone()))

    def _find_mask(self, tap: Tap, delta: Tensor) -> Tensor | None:
        """Return which positions of a map count, (G, P); None if all of the output's do."""
        keep = self._descent.keep
        if keep is None:
            return None
        samples_axis = min(self._descent.sharing.batch_dim, keep.ndim - 1)
        return _find_counted_positions(tap, delta, keep.movedim(samples_axis, 0))


def tap_moments(tap: Tap, sharing: Sharing, mask: Tensor | None = None) -> Moments:
    """Return the moments of a map's inputs, at the positions of a mask (G, P) or at all."""
    moments = compute_moments(torch.cat(tap.inputs, 1), sharing, mask)
    if mask is not None:
        return moments
    # groups are padded to one length, so that not all positions are real
    positions = tap.positions
    if len(set(positions)) == 1:
        return replace(moments, positions=positions[0])
    return replace(moments, positions=moments.first.new_tensor(positions))


def _replay(call: CompoundCall, cotangents: Sequence[Tensor | None]) -> Maps:
    """Return the maps of one layer with their cotangents, zeros where no gradient arrives."""
    outputs, taps = call.compound.replay(call.module, call.args, call.kwargs)
    tap_outputs: list[Tensor] = []
    for tap in taps:
        tap_outputs += tap.outputs
    deltas: list[Tensor] = []
    pulled_back = _pull(outputs, tap_outputs, cotangents)
    for tap_output, delta in zip(tap_outputs, pulled_back, strict=True):
        if delta is None:
            deltas.append(torch.zeros_like(tap_output))
        else:
            deltas.append(delta)
    remaining = iter(deltas)
    return [(tap, torch.cat(list(islice(remaining, len(tap.outputs))), 1)) for tap in taps]


def _pull(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Return the cotangents at the targets, None where an output does not depend on one."""
    reached_outputs: list[Tensor] = []
    output_cotangents: list[Tensor] = []
    for output, delta in zip(outputs, cotangents, strict=True):
        if delta is not None:
            reached_outputs.append(output)
            output_cotangents.append(delta.to(output.dtype))
    return torch.autograd.grad(reached_outputs, targets, output_cotangents, allow_unused=True)


def _find_counted_positions(tap: Tap, delta: Tensor, keep: Tensor) -> Tensor:
    """Return which positions of δ (G, P, O) count, (G, P), by δ and by the output's mask."""
    if tap.grids:
        grids = tap.grids
        samples_axis = tap.batch_dim
    else:
        grids = [(n, 1) for n in tap.positions]
        samples_axis = 0
    padded_masks: list[Tensor] = []
    for group_delta, n, grid in zip(delta, tap.positions, grids, strict=True):
        delta_by_sample = group_delta[:n].unflatten(0, grid).movedim(samples_axis, 0)
        mask = find_counted_positions(delta_by_sample, keep).movedim(0, samples_axis)
        padded_masks.append(F.pad(mask.flatten(), (0, delta.shape[1] - n)))
    return torch.stack(padded_masks)
