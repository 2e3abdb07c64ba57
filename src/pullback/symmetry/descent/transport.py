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
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer, RMSprop

from ..._core.errors import PullbackError
from ...grams.kronecker.packed_matrix import PackedMatrix, get_entries, unpack
from ...maps.layers import REGISTRY
from ...optim.kfac import KFAC
from ...optim.kfac.factors.block import BlockKey, FactorSide, block_shape
from ...optim.kfac.rules.natural_states import scale_rows_and_columns
from ...optim.kfac.state import KFACState
from ..scaling_units import ScalingUnits
from .sweeps import Follower

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


def find_powers(optimizer: Optimizer) -> dict[str, int]:
    """Return the powers of α for an optimizer's own state, by the state's names.

    Raises:
        PullbackError: for a rule of K-FAC whose state mixes the units of a layer.
    """
    if isinstance(optimizer, KFAC):
        rule = optimizer.rule
        if not rule.can_rescale:
            raise PullbackError(
                f"KFAC with {rule!r} does not go with slices",
                "its bases and roots mix the units of a layer, and are not rescaled with them",
                "Use KFAC(model, rule='natural'), or SliceSGD",
            )
        return {**POWERS, "length": 0}  # of the momentum in F̂, which does not see units
    if isinstance(optimizer, RMSprop):  # whose buffer holds gradients over their own size
        return {**POWERS, "momentum_buffer": 0}
    return dict(POWERS)


def list_followers(
    state: Mapping[str, object], w: Tensor, powers: Mapping[str, int]
) -> list[Follower]:
    """Return the tensors of a parameter's state that are shaped like it, with their powers."""
    followers: list[Follower] = []
    for name, value in state.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            continue
        if value.ndim == 0 and (w.ndim or name not in powers):
            continue  # a counter
        _refuse_unknown_state(name, value, w, powers)
        if powers[name]:
            followers.append(Follower(value, powers[name]))
    return followers


def _refuse_unknown_state(name: str, value: Tensor, w: Tensor, powers: Mapping[str, int]) -> None:
    """Raise where it is not known how an optimizer's state is rescaled."""
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


# --- K-FAC ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Multiplier:
    """A factor of a parameter.

    Attributes:
        values: broadcast to the parameter.
        scales_outputs: whether the layer's outputs are scaled, else its inputs. It decides where
            the parameter has a single entry.
    """

    values: Tensor
    scales_outputs: bool

    def to(self, other: Tensor) -> _Multiplier:
        """Return the factor in the dtype and on the device of another tensor."""
        return _Multiplier(self.values.to(other), self.scales_outputs)


@dataclass(frozen=True)
class _LayerScales:
    """W_ij ← l_i W_ij r_j for the matrices (rows, columns) of a weight, one per group of channels.

    Rows are a layer's outputs and columns its inputs, unless the weight is held as (inputs,
    outputs).

    Attributes:
        rows: l, (G, rows).
        columns: r, (G, columns), with the bias's coordinate.
    """

    rows: Tensor
    columns: Tensor

    def invert(self) -> _LayerScales:
        """Return 1/l and 1/r."""
        return _LayerScales(1 / self.rows, 1 / self.columns)


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
    multipliers: dict[str, list[_Multiplier]] = {}
    for parameter in units.parameters:
        legs = [_Multiplier(leg.log_multipliers(t).exp(), leg.power > 0) for leg in parameter.legs]
        multipliers[parameter.name] = legs
    scaled_keys = [key for key in state.averages if not multipliers.keys().isdisjoint(key.names)]
    for key in scaled_keys:
        if key in state.reserved:
            continue
        average = state.averages[key]
        block_parameters = [parameters[name] for name in key.names]
        block_multipliers = []
        for name in key.names:
            block_multipliers.append([m.to(average.mass) for m in multipliers.get(name, ())])
        if key.is_kronecker:
            _rescale_kronecker(state, key, block_parameters[0], block_multipliers[0])
        else:
            _rescale_units(state, key, block_parameters, block_multipliers)


def _rescale_units(
    state: KFACState,
    key: BlockKey,
    parameters: Sequence[Tensor],
    multipliers: Sequence[Sequence[_Multiplier]],
) -> None:
    """Rescale a block with a small matrix for each unit, as of a norm's gain and shift."""
    average = state.averages[key]
    by_parameter = []
    for parameter, parameter_multipliers in zip(parameters, multipliers, strict=True):
        ones = average.mass.new_ones(parameter.shape)
        factor = reduce(torch.mul, [m.values for m in parameter_multipliers], ones)
        by_parameter.append(factor.flatten())
    factors = torch.stack(by_parameter, 1)  # of every unit, (U, k)
    for value in (*average.value.values(), *average.mean.values()):
        scale_rows_and_columns(get_entries(value), 1 / factors)
    block = state.states.blocks[key]
    block.rule.rescale(block.state, factors, factors)


def _rescale_kronecker(
    state: KFACState, key: BlockKey, parameter: Tensor, multipliers: Sequence[_Multiplier]
) -> None:
    """Rescale a block with a factor for its rows and one for its columns."""
    average = state.averages[key]
    # In these uses a weight's rows belong to the layer's input.
    transposed_uses = {layer.use for layer in REGISTRY.values() if layer.input_first}
    input_first = all(factor.use in transposed_uses for factor in average.value)
    shape = block_shape(key, average.value)
    scales = _find_layer_scales(multipliers, parameter, shape, key, input_first)
    inverse_scales = scales.invert()
    for factor, value in (*average.value.items(), *average.mean.items()):
        if factor.side == FactorSide.MEAN:
            get_entries(value).mul_(inverse_scales.columns[:, : value.shape[-1]])
            continue
        matrix = unpack(value)
        if factor.side == FactorSide.ROWS:
            scale_rows_and_columns(matrix, inverse_scales.rows)
        else:
            scale_rows_and_columns(matrix, inverse_scales.columns)
        if matrix is not value:
            get_entries(value).copy_(PackedMatrix.pack(matrix).entries)
    block = state.states.blocks[key]
    block.rule.rescale(block.state, scales.rows, scales.columns)


def _find_layer_scales(
    multipliers: Sequence[_Multiplier],
    parameter: Tensor,
    shape: tuple[int, ...],
    key: BlockKey,
    input_first: bool,
) -> _LayerScales:
    """Return l and r of a block, with the bias's coordinate in the latter."""
    groups, row_count, column_count = shape
    template = multipliers[0].values if multipliers else parameter
    rows = template.new_ones(groups, row_count)
    columns = template.new_ones(groups, column_count - key.is_joint)
    for multiplier in multipliers:
        values = multiplier.values.expand(parameter.shape)
        if _is_along_columns(values, multiplier, key, input_first):
            # It is the same for all rows of a group.
            first_rows = values[:: max(1, len(values) // groups)]
            columns = columns * first_rows.reshape(groups, -1)
        else:
            first_column = values[(slice(None), *[0] * (parameter.ndim - 1))]
            rows = rows * first_column.reshape(groups, -1)
    if key.is_joint:
        columns = F.pad(columns, (0, 1), value=1.0)
    return _LayerScales(rows, columns)


def _is_along_columns(
    values: Tensor, multiplier: _Multiplier, key: BlockKey, input_first: bool
) -> bool:
    """Return True if values that are broadcast to a parameter scale its columns, not its rows.

    An axis along which they are broadcast has a stride of 0.
    """
    sizes_and_strides = zip(values.shape[1:], values.stride()[1:], strict=True)
    if any(size > 1 and stride for size, stride in sizes_and_strides):
        return True
    differs_along_rows = values.shape[0] > 1 and values.stride(0) != 0
    if differs_along_rows or key.is_bias:
        return False
    # There is one value: the side of the layer that is scaled decides.
    return multiplier.scales_outputs == input_first
