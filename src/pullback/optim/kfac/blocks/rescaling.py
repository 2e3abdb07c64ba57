r"""K-FAC's memory under a rescaling of parameters that leaves the function as it is.

Where a weight becomes W_oi ← l_o W_oi r_i (its bias b_o ← l_o b_o), its inputs have become a_i/r_i
and its cotangents δ_o/l_o, so that

    R ← L⁻¹R L⁻¹,   C ← D⁻¹C D⁻¹,   R⁻¹ ← L R⁻¹L,   C⁻¹ ← D C⁻¹D,   L = diag l,  D = diag(r, 1).

Averages of all past steps move in this way. So do the inverses, damping and all: the step that
they stand for is the same one in the function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..statistics.sums import Key
from .curvature import Curvature
from .inverse import Inverse
from .rounded import rounded

#: what multiplies a parameter: a tensor that is broadcast to it, and whether it comes with the
#: layer's outputs (else with its inputs), which tells where it has a single entry
Factors = Sequence[tuple[Tensor, bool]]


@torch.no_grad()
def rescale_(
    curvature: Curvature, parameters: Mapping[str, Tensor], factors: Mapping[str, Factors]
) -> None:
    """Bring averages and inverses to parameters that were multiplied by these factors.

    Args:
        curvature: an optimizer's; changed in place.
        parameters: the model's, by name.
        factors: by name, for the parameters that were multiplied.
    """
    for key, average in curvature.averages.items():
        if not any(name in factors for name in key.names) or not average.memory:
            continue
        some, own = average.memory[0], average.value
        given = [_to(factors.get(name, ()), some) for name in key.names]
        held = [own, *([] if average.mean is None else [average.mean])]
        inverse, correction = curvature.inverses.get(key), curvature.corrections.get(key)
        if key.kind != "kronecker":
            units = _entries(given, [parameters[n] for n in key.names])
            for values in held:  # never by halves
                _both(values["squares"], 1 / units)
            if inverse is not None and inverse.left is not None:
                _both(inverse.left, units)
            continue
        first = all(".first." in name for name in own)
        shape = curvature.shape(key)[0]
        left, right = _sides(given[0], parameters[key.names[0]], shape, key, first)
        for values in held:
            _averages(values, left, right)
        average.value = own
        if inverse is not None:
            wide = inverse.widened()
            _inverse(wide, left, right)
            if wide is not inverse:
                for room, new in inverse.renewals(rounded([wide])[0]) or ():
                    room.copy_(new)
            if correction is not None:
                _unturned(correction.value["values"], inverse, 1 / left, 1 / right)


def _to(factors: Factors, like: Tensor) -> list[tuple[Tensor, bool]]:
    return [(f.to(like), outputs) for f, outputs in factors]


def _entries(given: Sequence[Factors], params: Sequence[Tensor]) -> Tensor:
    """What multiplies gain and shift of every unit, (U, k)."""
    columns = []
    for factors, p in zip(given, params, strict=True):
        total = p.new_ones(p.shape) if not factors else factors[0][0].expand(p.shape)
        for f, _ in factors[1:]:
            total = total * f
        columns.append(total.flatten())
    return torch.stack(columns, 1)


def _sides(
    factors: Factors, p: Tensor, shape: tuple[int, ...], key: Key, first: bool
) -> tuple[Tensor, Tensor]:
    """l (G, O) and r (G, I), with the bias's coordinate in the latter."""
    some = factors[0][0] if factors else p
    groups, high, wide = shape
    left, right = some.new_ones(groups, high), some.new_ones(groups, wide - key.joint)
    for f, outputs in factors:
        f = f.expand(p.shape)
        across = any(n > 1 and s for n, s in zip(f.shape[1:], f.stride()[1:], strict=True))
        down = p.shape[0] > 1 and f.stride(0) != 0
        if across or (not down and outputs == first and not key.bias):
            # the same for all rows of a group
            right = right * f[:: max(1, len(f) // groups)].reshape(groups, -1)
        else:
            left = left * f[(slice(None), *[0] * (p.ndim - 1))].reshape(groups, -1)
    return left, F.pad(right, (0, 1), value=1.0) if key.joint else right


def _both(side: Tensor, f: Tensor) -> None:
    """f_i s_ij f_j, or f_i² s_i for a diagonal."""
    f = f[..., : side.shape[-1]]
    if side.ndim == f.ndim:
        side.mul_(f.square())
    else:
        side.mul_(f[..., None]).mul_(f[..., None, :])


def _averages(values: Mapping[str, Tensor], left: Tensor, right: Tensor) -> None:
    for name, side in values.items():
        tag, _, end = name.rpartition(".")
        _both(side, 1 / (left if tag.endswith(".first") == (end == "inputs") else right))


def _inverse(inverse: Inverse, left: Tensor, right: Tensor) -> None:
    """R⁻¹ and C⁻¹ in whichever form they are held."""
    for side, f in ((inverse.left, left), (inverse.right, right)):
        if side is None:
            continue
        if side.ndim == 2 or not (inverse.factors or inverse.scale is not None):
            _both(side, f)
        else:  # Cholesky factors of R, or a basis in which gradients are seen as before
            side.mul_((1 / f if inverse.factors else f)[..., None])
    if inverse.border is not None:
        inverse.border.mul_(right[:, :-1])
    if inverse.scale is not None:
        _unturned(inverse.scale, inverse, left, right)


def _unturned(values: Tensor, inverse: Inverse, left: Tensor, right: Tensor) -> None:
    """What is held in eigenbases moves where a side is a diagonal and has none."""
    if inverse.left is None:
        values.mul_(left.square()[..., None])
    if inverse.right is None:
        values.mul_(right.square()[:, None])
