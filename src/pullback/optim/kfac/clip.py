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
from ..._core.space import compute_dtype
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
            self._shorten(
                shares, clip_factor(_measure_exact_length(shares, curvature, params), self.limit)
            )
            return
        if self.is_stale:
            _recompute_lengths(shares, curvature, params, state)
        if not shares:
            return
        lengths = [
            _find_squared_lengths(share, gradients, params, state, measured) for share in shares
        ]
        if self.is_stale:
            _measure_undamped_ratios(shares, lengths, curvature, params, state)
            self.is_stale = False
        factor = clip_factor(_sum_undamped(shares, lengths, params, state), self.limit)
        self._shorten(shares, factor)
        for share, squares in zip(shares, lengths, strict=True):
            _store_lengths(share, squares * factor.square().to(squares), params, state, is_void)

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


def _sum_undamped(
    shares: Sequence[Share], lengths: Sequence[Tensor], params: ModelParameters, state: State
) -> Tensor:
    """Return η²·ρ·m'ᵀFm' over all shares, from what each parameter adds to m'ᵀFm'."""
    totals: list[Tensor] = []
    for share, squares in zip(shares, lengths, strict=True):
        ratios = [get_length_buffer(params.by_name[n], state)[1] for n in share.names]
        totals.append(share.lr**2 * (torch.stack(ratios).to(squares) * squares).sum())
    return torch.stack([total.to(totals[0]) for total in totals]).sum()


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
        curvature.lengths(params.gather_whole(moved, "moves"), params.templates, damped=False)
    )


def sum_lengths(lengths: Tensors) -> Tensor:
    """Return xᵀF̂x from what each parameter adds to it."""
    if not lengths:
        return torch.zeros(())
    first = next(iter(lengths.values()))
    return torch.stack([t.to(first) for t in lengths.values()]).sum().clamp(min=0)


def get_length_buffer(p: Any, state: State) -> Tensor:
    """Return what a parameter adds to mᵀFm of the last move, and the share ρ without damping."""
    buffers = state[p]
    dtype = compute_dtype(p.dtype)
    if "length" not in buffers:
        buffers["length"] = torch.tensor([0.0, 1.0], dtype=dtype, device=p.device)
    elif buffers["length"].device != p.device or buffers["length"].dtype != dtype:
        buffers["length"] = buffers["length"].to(p.device, dtype)
    return buffers["length"]


def _recompute_lengths(
    shares: Sequence[Share], curvature: KFACState, params: ModelParameters, state: State
) -> None:
    """Compute mᵀFm of the last moves anew, with the present F."""
    moves: dict[str, Tensor] = {}
    for share in shares:
        moves |= dict(zip(share.names, share.buffers, strict=False))
    if not moves:
        return
    lengths = curvature.lengths(params.gather_whole(moves, "moves"), params.templates, damped=True)
    for name, length in lengths.items():
        get_length_buffer(params.by_name[name], state)[0].copy_(length)


def _measure_undamped_ratios(
    shares: Sequence[Share],
    lengths: Sequence[Tensor],
    curvature: KFACState,
    params: ModelParameters,
    state: State,
) -> None:
    """Find the share of the coming move's length that is not the damping's, group by group."""
    for share, squares in zip(shares, lengths, strict=True):
        moves: dict[str, Tensor] = {}
        for i, name in enumerate(share.names):
            moves[name] = share.directions[i]
            if share.momentum:
                moves[name] = moves[name] + share.momentum * share.buffers[i]
        whole = params.gather_whole(moves, "moves")
        undamped = sum_lengths(curvature.lengths(whole, params.templates, damped=False))
        tiny = torch.finfo(squares.dtype).tiny
        ratio = (undamped.to(squares) / squares.sum().clamp(min=tiny)).clamp(0, 1)
        for name in share.names:
            get_length_buffer(params.by_name[name], state)[1].copy_(ratio)


def _find_squared_lengths(
    share: Share, gradients: Tensors, params: ModelParameters, state: State, measured: set[str]
) -> Tensor:
    """Return what each parameter of a share adds to m'ᵀFm'; those without a block add nothing."""
    pieces, _ = params.cut_pieces(share.names, [gradients[n] for n in share.names], [])
    products: list[Tensor] = []
    for i, name in enumerate(share.names):
        if name not in measured:
            direction = share.directions[i]
            products.append(direction.new_zeros((), dtype=compute_dtype(direction.dtype)))
            continue
        product = _dot(share.directions[i], pieces[i])
        if share.momentum:
            product = product + 2 * share.momentum * _dot(share.buffers[i], pieces[i])
        products.append(product)
    new = params.sum_pieces(share.names, torch.stack([t.to(products[0]) for t in products]))
    if not share.momentum:
        return new
    old = torch.stack([get_length_buffer(params.by_name[n], state)[0].to(new) for n in share.names])
    return share.momentum**2 * old + new


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Return ⟨x, y⟩, of halves in float32."""
    dtype = compute_dtype(x.dtype)
    return torch.dot(x.reshape(-1).to(dtype), y.reshape(-1).to(dtype))


def _store_lengths(
    share: Share, lengths: Tensor, params: ModelParameters, state: State, is_void: Tensor | None
) -> None:
    """Keep the lengths of moves that are taken, unless the step is void."""
    if not share.momentum:
        return
    stored = [get_length_buffer(params.by_name[n], state)[0] for n in share.names]
    if is_void is not None:
        old = torch.stack([t.to(lengths) for t in stored])
        lengths = torch.where(is_void.to(lengths.device) > 0, old, lengths)
    torch._foreach_copy_(stored, list(lengths.unbind()))
