"""Parameters that are added to the outputs of a layer and become its bias."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..ledger import Producer
from ..scales import collapse
from ..values import NO_UNIT, Activation, ParameterCoordinates
from ..walk import Walk


def attach_bias(walk: Walk, x: Activation, addend: ParameterCoordinates) -> bool:
    """Make a parameter the bias of the layer, or of the layers, behind x; return whether it is.

    It is where it has one number for each output, all outputs of each layer have one, and no layer
    has a bias already.
    """
    units, positions = torch.broadcast_tensors(collapse(x.unit), addend.positions())
    unit_list = units.flatten().tolist()
    position_list = positions.flatten().tolist()
    if NO_UNIT in unit_list:
        return False
    if len({*unit_list}) < len(unit_list) or len({*position_list}) < len(position_list):
        return False
    bias_rows = _find_bias_rows(walk, dict(zip(unit_list, position_list, strict=True)))
    if bias_rows is None:
        return False
    name = walk.name_vector(addend)
    for producer, rows in bias_rows:
        producer.bias = name
        producer.bias_rows = rows
        producer.bias_size = prod(addend.sizes)
    return True


def _find_bias_rows(
    walk: Walk, position_of_unit: dict[int, int]
) -> list[tuple[Producer, Tensor]] | None:
    """Return the layers without a bias that have these units, and the positions of their outputs.

    None where a unit belongs to no such layer, or where a layer has other outputs, too.
    """
    units_of_layer: dict[int, list[int]] = {}
    for unit in sorted(position_of_unit):
        number = walk.ledger.find_output(unit).producer
        units_of_layer.setdefault(number, []).append(unit)
    bias_rows = []
    for units in units_of_layer.values():
        source = walk.ledger.find_single_producer(torch.tensor(units))
        if source is None or source.producer.bias is not None or not source.is_complete:
            return None
        rows = torch.tensor([position_of_unit[unit] for unit in units])
        bias_rows.append((source.producer, rows))
    return bias_rows
