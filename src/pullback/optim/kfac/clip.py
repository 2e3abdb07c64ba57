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
from .factors.block import names_of
from .stacks import Tensors
from .state import KFACState
from .update import Share, State


class KLClip:
    """Shortens steps to a bound on their squared length.

    Args:
        limit: δ.
        is_exact: whether directions are no F⁻¹g, so that lengths are computed at each step.
    """

    def __init__(self, limit: float, *, is_exact: bool = False) -> None:
        self.limit = limit
        self._is_exact = is_exact
        #: whether F has changed since lengths were computed
        self.is_stale = False

    def apply(
        self,
        shares: Sequence[Share],
        gradients: Tensors,
        curvature: KFACState,
        params: ModelParameters,
        state: State,
        is_void: Tensor | None,
    ) -> None:
        """Shorten the steps ηm' of all shares to ηc·m' with η²c²·m'ᵀFm' ≤ δ."""
        measured = names_of(curvature.measured_keys)
        shares = [share for share in shares if not measured.isdisjoint(share.names)]
        if self._is_exact:
            length = _measure_exact_length(shares, curvature, params)
            self._shorten(shares, clip_factor(length, self.limit))
        elif shares:
            self._follow_lengths(shares, measured, gradients, curvature, params, state, is_void)

    def _follow_lengths(
        self,
        shares: Sequence[Share],
        measured: set[str],
        gradients: Tensors,
        curvature: KFACState,
        params: ModelParameters,
        state: State,
        is_void: Tensor | None,
    ) -> None:
        """Shorten steps by lengths that are updated from those of the last step, and store them."""
        for share in shares:
            share.lengths = [get_length_buffer(params.by_name[n], state) for n in share.names]
        if self.is_stale:
            _recompute_lengths(shares, curvature, params)
        squares = [_find_squared_lengths(share, gradients, params, measured) for share in shares]
        if self.is_stale:
            _measure_undamped_ratios(shares, squares, curvature, params)
            self.is_stale = False
        factor = clip_factor(_sum_undamped(shares, squares), self.limit)
        self._shorten(shares, factor)
        for share, lengths in zip(shares, squares, strict=True):
            _store_lengths(share, lengths * factor.square().to(lengths), is_void)

    def _shorten(self, shares: Sequence[Share], factor: Tensor) -> None:
        """Set the factor c of each share; on a device the host does not know it.

        There directions Δ are replaced by cΔ + (c − 1)μm, for which m' is c(μm + Δ).
        """
        if not factor.is_cuda:
            for share in shares:
                share.factor = float(factor)
            return
        for share in shares:
            directions = torch._foreach_mul(share.directions, factor)
            if share.momentum:
                change = torch._foreach_mul(share.buffers, (factor - 1) * share.momentum)
                torch._foreach_add_(directions, change)
            share.directions = list(directions)


def _sum_undamped(shares: Sequence[Share], squares: Sequence[Tensor]) -> Tensor:
    """Return η²·ρ·m'ᵀFm' over all shares, from what each parameter adds to m'ᵀFm'."""
    totals: list[Tensor] = []
    for share, lengths in zip(shares, squares, strict=True):
        ratios = _stack_on(lengths, share.lengths)[:, 1]
        totals.append(share.lr**2 * (ratios * lengths).sum())
    return torch.stack([total.to(totals[0]) for total in totals]).sum()


def _stack_on(template: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors in one, on the template's device and in its dtype."""
    return torch.stack([t.to(template) for t in tensors])


def _measure_exact_length(
    shares: Sequence[Share], curvature: KFACState, params: ModelParameters
) -> Tensor:
    """Return η²·m'ᵀF̂m' with F̂ as it is averaged now, without damping."""
    moved: dict[str, Tensor] = {}
    for share in shares:
        for i, name in enumerate(share.names):
            direction = share.directions[i]
            if share.momentum:
                direction = direction + share.momentum * share.buffers[i]
            moved[name] = share.lr * direction
    return sum_lengths(
        curvature.compute_lengths(
            params.gather_whole(moved, "moves"), params.templates, damped=False
        )
    )


def sum_lengths(lengths: Tensors) -> Tensor:
    """Return xᵀF̂x from what each parameter adds to it."""
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
    shares: Sequence[Share], curvature: KFACState, params: ModelParameters
) -> None:
    """Store mᵀFm of the last moves, computed anew with the present F."""
    moves: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for share in shares:
        moves |= dict(zip(share.names, share.buffers, strict=False))
        buffers |= dict(zip(share.names, share.lengths, strict=True))
    if not moves:
        return
    lengths = curvature.compute_lengths(
        params.gather_whole(moves, "moves"), params.templates, damped=True
    )
    for name, length in lengths.items():
        buffers[name][0].copy_(length)


def _measure_undamped_ratios(
    shares: Sequence[Share],
    squares: Sequence[Tensor],
    curvature: KFACState,
    params: ModelParameters,
) -> None:
    """Store ρ, the share of the coming move's length that is not the damping's, by group."""
    for share, lengths in zip(shares, squares, strict=True):
        moves: dict[str, Tensor] = {}
        for i, name in enumerate(share.names):
            moves[name] = share.directions[i]
            if share.momentum:
                moves[name] = moves[name] + share.momentum * share.buffers[i]
        whole = params.gather_whole(moves, "moves")
        undamped = sum_lengths(curvature.compute_lengths(whole, params.templates, damped=False))
        tiny = torch.finfo(lengths.dtype).tiny
        ratio = (undamped.to(lengths) / lengths.sum().clamp(min=tiny)).clamp(0, 1)
        for buffer in share.lengths:
            buffer[1].copy_(ratio)


def _find_squared_lengths(
    share: Share, gradients: Tensors, params: ModelParameters, measured: set[str]
) -> Tensor:
    """Return what each parameter of a share adds to m'ᵀFm'; those without a block add nothing."""
    pieces, _ = params.cut_pieces(share.names, [gradients[n] for n in share.names], [])
    along_directions: list[Tensor] = []
    along_moves: list[Tensor] = []
    for i, name in enumerate(share.names):
        dtype = share.lengths[i].dtype
        if name not in measured:
            zero = share.directions[i].new_zeros((), dtype=dtype)
            along_directions.append(zero)
            along_moves.append(zero)
            continue
        gradient = _flatten(pieces[i], dtype)
        along_directions.append(torch.dot(_flatten(share.directions[i], dtype), gradient))
        if share.momentum:
            along_moves.append(torch.dot(_flatten(share.buffers[i], dtype), gradient))
    lengths = _stack_on(along_directions[0], along_directions)
    if not share.momentum:
        return params.sum_pieces(share.names, lengths)
    lengths = torch.add(lengths, _stack_on(lengths, along_moves), alpha=2 * share.momentum)
    lengths = params.sum_pieces(share.names, lengths)
    last_lengths = _stack_on(lengths, share.lengths)[:, 0]
    return torch.add(lengths, last_lengths, alpha=share.momentum**2)


def _flatten(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as a vector of this dtype; for most biases that is no operation."""
    if x.ndim != 1:
        x = x.reshape(-1)
    if x.dtype != dtype:
        x = x.to(dtype)
    return x


def _store_lengths(share: Share, lengths: Tensor, is_void: Tensor | None) -> None:
    """Keep the lengths of moves that are taken, unless the step is void."""
    if not share.momentum:
        return
    stacked = _stack_on(lengths, share.lengths)
    if is_void is not None:
        lengths = torch.where(is_void.to(lengths.device) > 0, stacked[:, 0], lengths)
    stacked[:, 0] = lengths
    torch._foreach_copy_(share.lengths, list(stacked.unbind()))
