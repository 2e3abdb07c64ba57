r"""Functions of the parameters that are constant on orbits.

Three kinds: parameters that no action moves; the representative of each scaling's orbit whose
units have incoming norm 1; and products of matrices between which a group mixes (B A, qᵀk). Where
actions overlap, only those are given that all of them leave alone. The outputs on the example are
constant in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..actions.action import Action
from ..actions.mixing import Mixing
from ..actions.scaling import Scaling


def invariants(actions: Sequence[Action], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By name: that of a parameter for entries of a representative, else words."""
    wide = {n: w.detach().double() for n, w in params.items()}
    here = dict(_candidates(actions, wide))
    generator = torch.Generator().manual_seed(5)
    there = dict(wide)
    for action in actions:
        one = wide[action.names[0]]
        element = torch.randn(action.dimension, generator=generator, dtype=torch.float64) / 2
        there.update(action.act(there, (element / action.dimension**0.5).to(one)))
    moved = dict(_candidates(actions, there))
    return {n: t for n, t in here.items() if _same(t, moved[n])}


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= 1e-9 * (a.norm() + b.norm()))


def _candidates(
    actions: Sequence[Action], params: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    scalings = [a for a in actions if isinstance(a, Scaling)]
    yield from normalized(scalings, params).items()
    for action in actions:
        if isinstance(action, Mixing):
            for name, product in _products(action, params):
                yield f"{action.about}, with {name}", product


def normalized(
    scalings: Sequence[Scaling], params: Mapping[str, Tensor], sweeps: int = 100
) -> dict[str, Tensor]:
    """All parameters, scaled so that Σ of the squares that lead into each unit is 1.

    Units that nothing leads into stay. One sweep does for layers in a row.
    """
    out = {n: w.detach() for n, w in params.items()}
    for _ in range(sweeps):
        off = 0.0
        for scaling in scalings:
            one = out[scaling.names[0]]
            energy = torch.zeros(scaling.units, dtype=one.dtype, device=one.device)
            for leg in scaling.legs:
                if leg.power > 0:
                    energy += leg.sums(_lined(out[leg.name], leg.unit).square(), scaling.units)
            scales = torch.where(energy > 0, energy, 1.0).rsqrt()
            out.update(scaling.scale(out, scales))
            off = max(off, float((scales - 1).abs().max()) if len(scales) else 0.0)
        if off <= 1e-14:
            break
    return out


def _lined(w: Tensor, unit: Tensor) -> Tensor:
    """w with the axes that its units have."""
    return w if w.ndim == unit.ndim else w.view(*w.shape, *[1] * (unit.ndim - w.ndim))


def _products(action: Mixing, params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What the matrices make together, without the outputs in between: (outputs, inputs)."""
    left: list[tuple[str, Tensor]] = []
    right: list[Tensor] = []
    for name, places, axis, inverse in action.sides():
        w = params[name]
        chosen = w.index_select(axis, places.to(w.device)).movedim(axis, 0)
        lined = chosen.reshape(action.size, -1)
        if inverse:
            right.append(lined)
        else:
            left.append((name, lined))
    for name, lined in left:
        yield name, torch.cat(right, 1).T @ lined
