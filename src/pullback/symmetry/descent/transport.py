r"""How an optimizer's state moves when parameters are rescaled, w ← αw.

Gradients are covectors, g ← g/α. What averages them moves alike, averages of their squares with
1/α², and what is measured in units of the parameter with α.

K-FAC's averages and inverses follow too. Where a weight becomes W_oi ← l_o W_oi r_i (its bias
b_o ← l_o b_o), its inputs have become a_i/r_i and its cotangents δ_o/l_o, so that

    R ← L⁻¹R L⁻¹,   C ← D⁻¹C D⁻¹,   R⁻¹ ← L R⁻¹L,   C⁻¹ ← D C⁻¹D,   L = diag l,  D = diag(r, 1).

Averages of all past steps move in this way. So do the inverses, damping included: the step that
they stand for changes the function in the same way as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer, RMSprop

from ..._core.errors import PullbackError
from ...grams.kronecker.inverse import Inverse, rounded, widened
from ...grams.kronecker.packed_matrix import PackedMatrix, get_entries, unpack
from ...maps.layers import REGISTRY
from ...optim.kfac import KFAC
from ...optim.kfac.factors.block import SPECTRUM, BlockKey, block_shape
from ...optim.kfac.state import KFACState
from ..retraction import ScalingUnits

#: the power of α that each kind of state is multiplied by, by the names that torch's optimizers use
POWERS: dict[str, int] = {
    # averages of gradients
    "momentum_buffer": -1,
    "exp_avg": -1,
    "grad_avg": -1,
    "exp_inf": -1,
    "prev": -1,
    # averages of squared gradients
    "exp_avg_sq": -2,
    "max_exp_avg_sq": -2,
    "square_avg": -2,
    "sum": -2,
    # in units of the parameter
    "ax": 1,
    "step_size": 1,
    "momentum": 1,
    "acc_delta": 2,
}


def powers_of(optimizer: Optimizer) -> dict[str, int]:
    """The powers of an optimizer's own state; raise for what knows no single units."""
    rule = optimizer.blocks.preconditioner.rule if isinstance(optimizer, KFAC) else None
    if rule is not None and rule.matrices:
        raise PullbackError(
            f"KFAC with {rule!r} does not go with slices",
            "its bases and roots mix the units of a layer, and are not rescaled with them",
            "Use KFAC(model, rule='natural'), or SliceSGD",
        )
    if isinstance(optimizer, RMSprop):  # whose buffer holds gradients over their own size
        return {**POWERS, "momentum_buffer": 0}
    return dict(POWERS)


def followers(
    state: Mapping[str, object], w: Tensor, powers: Mapping[str, int]
) -> list[tuple[Tensor, int]]:
    """The tensors of a parameter's state that are shaped like it, with their powers."""
    found = []
    for name, value in state.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            continue
        if value.ndim == 0 and (w.ndim or name not in powers):
            continue  # a counter
        if value.shape != w.shape and powers.get(name) != 0:
            raise PullbackError(
                f"The optimizer's state {name!r} cannot be rescaled",
                f"it is {tuple(value.shape)} for a parameter {tuple(w.shape)}: factors of an "
                "average, whose units are not told apart",
                f'Use Adam, or leave it as it is: transport={{"{name}": 0}}',
            )
        if name not in powers:
            raise PullbackError(
                f"It is not known how the optimizer's state {name!r} is rescaled",
                "it has the shape of the parameter and is none of torch's own",
                f'Say so: transport={{"{name}": -1}} for an average of gradients, -2 for one of '
                "their squares, 1 for what is measured like the parameter, 0 to leave it",
            )
        if powers[name]:
            found.append((value, powers[name]))
    return found


#: what multiplies a parameter: tensors that are broadcast to it, each with whether it scales the
#: layer's outputs (else its inputs), which decides where the parameter has a single entry
Multipliers = Sequence[tuple[Tensor, bool]]


@torch.no_grad()
def rescale_curvature(
    state: KFACState, parameters: Mapping[str, Tensor], units: ScalingUnits, t: Tensor
) -> None:
    """Bring averages and inverses to parameters that were multiplied by log-scales t (U,).

    Args:
        state: K-FAC's; changed in place.
        parameters: the model's, by name.
        units: that were scaled.
        t: by how much.
    """
    scales = {
        part.name: [(leg.rates(t).exp(), leg.power > 0) for leg in part.legs]
        for part in units.parts
    }
    #: roles in which a weight's rows belong to the layer's input
    transposed = {type(kind).__name__ for kind in REGISTRY.values() if kind.input_first}
    for key, average in state.averages.items():
        if key in state.reserved or not any(name in scales for name in key.names):
            continue
        given = [[(f.to(average.mass), o) for f, o in scales.get(n, ())] for n in key.names]
        inverse = state.preconditioner.inverses[key]
        held = [*average.value.items(), *average.mean.items()]
        if not key.kronecker:
            ones = [average.mass.new_ones(parameters[n].shape) for n in key.names]
            columns = [
                reduce(torch.mul, [f for f, _ in factors], one).flatten()
                for factors, one in zip(given, ones, strict=True)
            ]
            entries = torch.stack(columns, 1)  # of gain and shift of every unit, (U, k)
            for _, value in held:
                _both(get_entries(value), 1 / entries)
            assert inverse.left is not None
            _both(inverse.left, entries)
            continue
        input_first = all(factor.role in transposed for factor in average.value)
        shape = block_shape(key, average.value)
        left, right = _sides(given[0], parameters[key.names[0]], shape, key, input_first)
        for factor, value in held:
            if factor.side == "mean":
                get_entries(value).mul_(1 / right[:, : value.shape[-1]])
                continue
            side = unpack(value)
            _both(side, 1 / (left if factor.side == "left" else right))
            if side is not value:
                get_entries(value).copy_(PackedMatrix.pack(side).entries)
        _rescale_inverse(inverse, left, right)
        spectrum = state.preconditioner.spectra.get(key)
        if spectrum is not None:
            _outside_bases(get_entries(spectrum.value[SPECTRUM]), inverse, 1 / left, 1 / right)


def _sides(
    scales: Multipliers, p: Tensor, shape: tuple[int, ...], key: BlockKey, input_first: bool
) -> tuple[Tensor, Tensor]:
    """l (G, O) and r (G, I), with the bias's coordinate in the latter."""
    some = scales[0][0] if scales else p
    groups, high, wide = shape
    left, right = some.new_ones(groups, high), some.new_ones(groups, wide - key.joint)
    for f, outputs in scales:
        f = f.expand(p.shape)
        across = any(n > 1 and s for n, s in zip(f.shape[1:], f.stride()[1:], strict=True))
        down = p.shape[0] > 1 and f.stride(0) != 0
        if across or (not down and outputs == input_first and not key.bias):
            # the same for all rows of a group
            right = right * f[:: max(1, len(f) // groups)].reshape(groups, -1)
        else:
            left = left * f[(slice(None), *[0] * (p.ndim - 1))].reshape(groups, -1)
    return left, F.pad(right, (0, 1), value=1.0) if key.joint else right


def _both(side: Tensor, f: Tensor) -> None:
    """Multiply to f_i s_ij f_j, or f_i² s_i for a diagonal; padding stays zero."""
    n = min(f.shape[-1], side.shape[-1])
    f, side = f[..., :n], side[..., :n]
    if side.ndim == f.ndim:
        side.mul_(f.square())
    else:
        side[..., :n, :].mul_(f[..., None]).mul_(f[..., None, :])


def _rescale_inverse(inverse: Inverse, left: Tensor, right: Tensor) -> None:
    """Rescale R⁻¹ and C⁻¹: as matrices, diagonals, Cholesky factors or eigenbases."""
    if inverse.rows is not None:
        wide = widened(inverse)
        _rescale_inverse(wide, left, right)
        for name, t in rounded(wide).tensors().items():
            getattr(inverse, name).copy_(t)
        return
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
    """Rescale eigenvalues along the sides that are diagonal and have no eigenbasis."""
    if inverse.left is None:
        values.mul_(left.square()[..., None])
    if inverse.right is None:
        values.mul_(right.square()[:, None])
