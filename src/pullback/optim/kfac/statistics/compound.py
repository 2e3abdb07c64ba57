"""The moments of the affine maps inside compound layers, from their replays."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ....grams.kronecker.packed_matrix import pack, unpack
from ....maps.layers import Tap
from ....maps.layers.moments import (
    Moments,
    Sharing,
    compute_moments,
    compute_second_moment,
    find_kept_or_reached_positions,
)
from ....maps.replay import CompoundReplays
from .descent import Descent
from .plan import BlockPlan, LayerUse
from .sums import BIAS_OUTPUT, Pool, get_factor_keys


def list_map_uses(replays: CompoundReplays) -> list[LayerUse]:
    """Return the maps of compound layers, as a plan of blocks sees them."""
    uses: list[LayerUse] = []
    for _, maps in replays.replay_calls():
        uses += [LayerUse(use.names, "kronecker", True, use.tap.form) for use in maps]
    return uses


def add_map_moments(
    replays: CompoundReplays, descent: Descent, pool: Pool, plan: BlockPlan
) -> None:
    """Add the moments of the maps of compound layers to the blocks of the plan."""
    for call, maps in replays.replay_calls():
        for use in maps:
            if not any(use.tap.positions):
                continue
            output_moment = pack(compute_second_moment(use.delta, descent.sharing))
            if (key := plan.weight_block(use.names)) is not None:
                input_factor, output_factor = get_factor_keys(call.compound, key)
                if descent.adds_inputs:
                    mask = _find_mask(use.tap, use.delta, descent)
                    moments = compute_tap_moments(use.tap, descent.sharing, mask)
                    pool.of(key).add(input_factor, moments)
                pool.of(key).add(output_factor, output_moment)
            if (key := plan.bias_block(use.names)) is not None:
                pool.of(key).add(BIAS_OUTPUT, pack(unpack(output_moment).clone()))


def _find_mask(tap: Tap, delta: Tensor, descent: Descent) -> Tensor | None:
    """Return which positions of a map count, (G, P); None if all of the output's do."""
    counted = descent.counted
    if counted is None:
        return None
    samples_axis = min(descent.sharing.batch_dim, counted.ndim - 1)
    return _find_counted_positions(tap, delta, counted.movedim(samples_axis, 0))


def compute_tap_moments(tap: Tap, sharing: Sharing, mask: Tensor | None = None) -> Moments:
    """Return the moments of a map's inputs, at the positions of a mask (G, P) or at all."""
    moments = compute_moments(torch.cat(tap.inputs, 1), sharing, mask)
    if mask is not None:
        return moments
    # groups are padded to one length, so that not all positions are real
    positions = tap.positions
    if len(set(positions)) == 1:
        return replace(moments, positions=positions[0])
    return replace(moments, positions=moments.first.new_tensor(positions))


def _find_counted_positions(tap: Tap, delta: Tensor, counted: Tensor) -> Tensor:
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
        mask = find_kept_or_reached_positions(delta_by_sample, counted).movedim(0, samples_axis)
        padded_masks.append(F.pad(mask.flatten(), (0, delta.shape[1] - n)))
    return torch.stack(padded_masks)
