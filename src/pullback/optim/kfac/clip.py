r"""The KL clip: a step ηm is shortened to η²·mᵀFm ≤ δ.

F is the damped metric whose inverse is in use, so that FΔ = g for the direction Δ = F⁻¹g. For
m' = μm + Δ then

    m'ᵀFm' = μ²·mᵀFm + 2μ⟨m, g⟩ + ⟨Δ, g⟩,

two inner products and the last length. When F changes, mᵀFm is computed anew, and the share ρ of
m'ᵀFm' that is not the damping's: η²·ρ·m'ᵀFm' ≤ δ until F changes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core.shards import ModelParameters
from ...steps.wrappers import clip_factor
from .block_stack import Tensors
from .factors.block import names_of
from .state import KFACState
from .update import GroupUpdate, State


class KLClip:
    """Shortens steps to a bound on their squared length.

    Args:
        limit: δ.
        measures_every_step: whether lengths are computed from the averages at each step, and not
            carried from one step to the next. A step that a closure controls is no F⁻¹g, for
            which alone FΔ = g holds.
    """

    def __init__(self, limit: float, *, measures_every_step: bool = False) -> None:
        self.limit = limit
        self._measures_every_step = measures_every_step
        #: whether F has changed since lengths were computed
        self.is_stale = False

    def apply(
        self,
        updates: Sequence[GroupUpdate],
        gradients: Tensors,
        curvature: KFACState,
        params: ModelParameters,
        state: State,
        is_void: Tensor | None,
    ) -> None:
        """Shorten the steps ηm' of all updates to ηc·m' with η²c²·m'ᵀFm' ≤ δ."""
        measured = names_of(curvature.measured_keys)
        updates = [update for update in updates if not measured.isdisjoint(update.names)]
        if self._measures_every_step:
            length = _measure_length(updates, curvature, params)
            self._shorten(updates, clip_factor(length, self.limit))
        elif updates:
            self._shorten_by_carried_lengths(
                updates, measured, gradients, curvature, params, state, is_void
            )

    def _shorten_by_carried_lengths(
        self,
        updates: Sequence[GroupUpdate],
        measured: set[str],
        gradients: Tensors,
        curvature: KFACState,
        params: ModelParameters,
        state: State,
        is_void: Tensor | None,
    ) -> None:
        """Shorten steps by m'ᵀFm', which follows from the stored mᵀFm of the last; store it."""
        for update in updates:
            update.length_buffers = [
                get_length_buffer(params.by_name[n], state) for n in update.names
            ]
        if self.is_stale:
            _recompute_lengths(updates, curvature, params)
        squared_lengths = [
            _find_squared_lengths(update, gradients, params, measured) for update in updates
        ]
        if self.is_stale:
            _measure_undamped_ratios(updates, squared_lengths, curvature, params)
            self.is_stale = False
        factor = clip_factor(_sum_without_damping(updates, squared_lengths), self.limit)
        self._shorten(updates, factor)
        for update, lengths in zip(updates, squared_lengths, strict=True):
            _store_lengths(update, lengths * factor.square().to(lengths), is_void)

    def _shorten(self, updates: Sequence[GroupUpdate], factor: Tensor) -> None:
        """Shorten each update by the factor c.

        On a device the host does not know c: there directions Δ are replaced by cΔ + (c − 1)μm,
        for which m' is c(μm + Δ).
        """
        if not factor.is_cuda:
            for update in updates:
                update.shortening = float(factor)
            return
        for update in updates:
            directions = torch._foreach_mul(update.directions, factor)
            if update.momentum:
                change = torch._foreach_mul(update.momenta, (factor - 1) * update.momentum)
                torch._foreach_add_(directions, change)
            update.directions = list(directions)


def _sum_without_damping(
    updates: Sequence[GroupUpdate], squared_lengths: Sequence[Tensor]
) -> Tensor:
    """Return η²·ρ·m'ᵀFm' over all updates, from what each parameter adds to m'ᵀFm'."""
    totals: list[Tensor] = []
    for update, lengths in zip(updates, squared_lengths, strict=True):
        ratios = _stack_on(lengths, update.length_buffers)[:, 1]
        totals.append(update.lr**2 * (ratios * lengths).sum())
    return torch.stack([total.to(totals[0]) for total in totals]).sum()


def _stack_on(template: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors in one, on the template's device and in its dtype."""
    return torch.stack([t.to(template) for t in tensors])


def _measure_length(
    updates: Sequence[GroupUpdate], curvature: KFACState, params: ModelParameters
) -> Tensor:
    """Return η²·m'ᵀF̂m' with F̂ as it is averaged now, without damping."""
    moved: dict[str, Tensor] = {}
    for update in updates:
        for i, name in enumerate(update.names):
            direction = update.directions[i]
            if update.momentum:
                direction = direction + update.momentum * update.momenta[i]
            moved[name] = update.lr * direction
    return sum_lengths(
        curvature.compute_lengths(
            params.gather_whole(moved, "moves"), params.templates, damped=False
        )
    )


def sum_lengths(lengths: Tensors) -> Tensor:
    """Return xᵀF̂x, a scalar tensor ≥ 0, from what each parameter adds to it, by name."""
    if not lengths:
        return torch.zeros(())
    first = next(iter(lengths.values()))
    return torch.stack([t.to(first) for t in lengths.values()]).sum().clamp(min=0)


def get_length_buffer(p: Any, state: State) -> Tensor:
    """Return the buffer, (2,): what a parameter adds to mᵀFm of the last move, and its share ρ."""
    buffers = state[p]
    dtype = torch.float32
    if p.dtype == torch.float64:
        dtype = torch.float64
    if "length" not in buffers:
        buffers["length"] = torch.tensor([0.0, 1.0], dtype=dtype, device=p.device)
    elif buffers["length"].device != p.device or buffers["length"].dtype != dtype:
        buffers["length"] = buffers["length"].to(p.device, dtype)
    return buffers["length"]


def _recompute_lengths(
    updates: Sequence[GroupUpdate], curvature: KFACState, params: ModelParameters
) -> None:
    """Store mᵀFm of the last moves, computed anew with the present F."""
    moves: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for update in updates:
        moves |= dict(zip(update.names, update.momenta, strict=False))
        buffers |= dict(zip(update.names, update.length_buffers, strict=True))
    if not moves:
        return
    lengths = curvature.compute_lengths(
        params.gather_whole(moves, "moves"), params.templates, damped=True
    )
    for name, length in lengths.items():
        buffers[name][0].copy_(length)


def _measure_undamped_ratios(
    updates: Sequence[GroupUpdate],
    squared_lengths: Sequence[Tensor],
    curvature: KFACState,
    params: ModelParameters,
) -> None:
    """Store ρ, the share of the coming move's length that is not the damping's, by group."""
    for update, lengths in zip(updates, squared_lengths, strict=True):
        moves: dict[str, Tensor] = {}
        for i, name in enumerate(update.names):
            moves[name] = update.directions[i]
            if update.momentum:
                moves[name] = moves[name] + update.momentum * update.momenta[i]
        whole = params.gather_whole(moves, "moves")
        undamped = sum_lengths(curvature.compute_lengths(whole, params.templates, damped=False))
        tiny = torch.finfo(lengths.dtype).tiny
        ratio = (undamped.to(lengths) / lengths.sum().clamp(min=tiny)).clamp(0, 1)
        for buffer in update.length_buffers:
            buffer[1].copy_(ratio)


def _find_squared_lengths(
    update: GroupUpdate, gradients: Tensors, params: ModelParameters, measured: set[str]
) -> Tensor:
    """Return what each parameter of an update adds to m'ᵀFm'; those without a block add nothing."""
    pieces, _ = params.cut_pieces(update.names, [gradients[n] for n in update.names], [])
    along_directions: list[Tensor] = []
    along_moves: list[Tensor] = []
    for i, name in enumerate(update.names):
        dtype = update.length_buffers[i].dtype
        if name not in measured:
            zero = update.directions[i].new_zeros((), dtype=dtype)
            along_directions.append(zero)
            along_moves.append(zero)
            continue
        gradient = _flatten(pieces[i], dtype)
        along_directions.append(torch.dot(_flatten(update.directions[i], dtype), gradient))
        if update.momentum:
            along_moves.append(torch.dot(_flatten(update.momenta[i], dtype), gradient))
    lengths = _stack_on(along_directions[0], along_directions)
    if not update.momentum:
        return params.sum_pieces(update.names, lengths)
    lengths = torch.add(lengths, _stack_on(lengths, along_moves), alpha=2 * update.momentum)
    lengths = params.sum_pieces(update.names, lengths)
    last_lengths = _stack_on(lengths, update.length_buffers)[:, 0]
    return torch.add(lengths, last_lengths, alpha=update.momentum**2)


def _flatten(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as a vector of this dtype; for most biases that is no operation."""
    if x.ndim != 1:
        x = x.reshape(-1)
    if x.dtype != dtype:
        x = x.to(dtype)
    return x


def _store_lengths(update: GroupUpdate, lengths: Tensor, is_void: Tensor | None) -> None:
    """Keep the lengths of moves that are taken, unless the step is void."""
    if not update.momentum:
        return
    stacked = _stack_on(lengths, update.length_buffers)
    if is_void is not None:
        lengths = torch.where(is_void.to(lengths.device) > 0, stacked[:, 0], lengths)
    stacked[:, 0] = lengths
    torch._foreach_copy_(update.length_buffers, list(stacked.unbind()))
