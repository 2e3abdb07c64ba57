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

from ....grams.kronecker.inverse import Inverse
from ....grams.kronecker.packed import Packed, memory, whole
from .average import Average
from .factor import SPECTRUM, BlockKey, block_shape
from .preconditioner import Preconditioner

#: what multiplies a parameter: a tensor that is broadcast to it, and whether it comes with the
#: layer's outputs (else with its inputs), which tells where it has a single entry
Scales = Sequence[tuple[Tensor, bool]]


@torch.no_grad()
def rescale_(
    averages: Mapping[BlockKey, Average],
    preconditioner: Preconditioner,
    parameters: Mapping[str, Tensor],
    scales: Mapping[str, Scales],
    input_first: frozenset[str],
) -> None:
    """Bring averages and inverses to parameters that were multiplied by these scales.

    Args:
        averages, preconditioner: an optimizer's; changed in place.
        parameters: the model's, by name.
        scales: by name, for the parameters that were multiplied.
        input_first: roles in which a weight's rows belong to the layer's input.
    """
    for key, average in averages.items():
        if not any(name in scales for name in key.names):
            continue
        given = [[(f.to(average.mass), o) for f, o in scales.get(n, ())] for n in key.names]
        inverse = preconditioner.inverses[key]
        held = [*average.value.items(), *average.mean.items()]
        if not key.kronecker:
            units = _entries(given, [parameters[n] for n in key.names])
            for _, value in held:
                _both(memory(value), 1 / units)
            assert inverse.left is not None
            _both(inverse.left, units)
            continue
        first = all(factor.role in input_first for factor in average.value)
        shape = block_shape(key, average.value)
        left, right = _sides(given[0], parameters[key.names[0]], shape, key, first)
        for factor, value in held:
            if factor.side == "mean":
                memory(value).mul_(1 / right[:, : value.shape[-1]])
                continue
            side = whole(value)
            _both(side, 1 / (left if factor.side == "left" else right))
            if side is not value:
                memory(value).copy_(Packed.of(side).memory)
        _rescale_inverse(inverse, left, right)
        spectrum = preconditioner.spectra.get(key)
        if spectrum is not None:
            _outside_bases(memory(spectrum.value[SPECTRUM]), inverse, 1 / left, 1 / right)


def _entries(given: Sequence[Scales], params: Sequence[Tensor]) -> Tensor:
    """What multiplies gain and shift of every unit, (U, k)."""
    columns = []
    for scales, p in zip(given, params, strict=True):
        total = p.new_ones(p.shape) if not scales else scales[0][0].expand(p.shape)
        for f, _ in scales[1:]:
            total = total * f
        columns.append(total.flatten())
    return torch.stack(columns, 1)


def _sides(
    scales: Scales, p: Tensor, shape: tuple[int, ...], key: BlockKey, first: bool
) -> tuple[Tensor, Tensor]:
    """l (G, O) and r (G, I), with the bias's coordinate in the latter."""
    some = scales[0][0] if scales else p
    groups, high, wide = shape
    left, right = some.new_ones(groups, high), some.new_ones(groups, wide - key.joint)
    for f, outputs in scales:
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
    """f_i s_ij f_j, or f_i² s_i for a diagonal; what a side is filled up with stays zero."""
    n = min(f.shape[-1], side.shape[-1])
    f, side = f[..., :n], side[..., :n]
    if side.ndim == f.ndim:
        side.mul_(f.square())
    else:
        side[..., :n, :].mul_(f[..., None]).mul_(f[..., None, :])


def _rescale_inverse(inverse: Inverse, left: Tensor, right: Tensor) -> None:
    """R⁻¹ and C⁻¹ in whichever form they are held."""
    for side, f in ((inverse.left, left), (inverse.right, right)):
        if side is None:
            continue
        if side.ndim == 2 or (inverse.scale is None and not inverse.factors):
            _both(side, f)
        else:  # Cholesky factors of R, or a basis in which gradients are seen as before
            side.mul_((1 / f if inverse.factors else f)[..., None])
    if inverse.scale is not None:
        _outside_bases(inverse.scale, inverse, left, right)


def _outside_bases(values: Tensor, inverse: Inverse, left: Tensor, right: Tensor) -> None:
    """What is held in eigenbases moves where a side is a diagonal and has none."""
    if inverse.left is None:
        values.mul_(left.square()[..., None])
    if inverse.right is None:
        values.mul_(right.square()[:, None])
