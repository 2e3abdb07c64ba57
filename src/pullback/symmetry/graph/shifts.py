"""Shifts of the outputs of single layers that their readers remove.

A bias can be moved into the biases of the layers that read it, or has no effect at all (a key's
bias, a bias before a batch norm). A layer norm or a softmax removes what is common to all of a
layer's outputs. Behind a layer norm, weights do not see the direction in which its outputs sum to
zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..actions.action import Action, Parameters
from ..actions.scaling import Leg
from ..actions.shifts import (
    ParameterRows,
    Reader,
    bias_shift,
    common_shift,
    folded_shift,
    mean_shift,
)
from .ledger import (
    BatchNormReading,
    FixedNormReading,
    Ledger,
    LinearReading,
    NormReading,
    Operation,
    Output,
    PairReading,
    Producer,
    Reading,
    SoftmaxReading,
    Use,
)
from .readers import Readers
from .walk import Walk


def find_shifts(walk: Walk, readers: Readers, params: Parameters) -> Iterator[Action]:
    """Yield shifts of biases that other biases can take over, or that have no effect."""
    for number in range(len(walk.ledger.producers)):
        for outputs in _group_by_readers(readers, number):
            action = _move_bias(walk, readers, outputs)
            if action is not None:
                yield action
    for reading in walk.ledger.readings:
        action = None
        if isinstance(reading, (NormReading, SoftmaxReading)):
            action = _find_common_shift(readers, reading, params)
        elif isinstance(reading, LinearReading):
            action = _shift_mean(walk.ledger, reading)
        if action is not None:
            yield action


def make_reader(layer: Producer, columns: Tensor) -> Reader:
    """Return a linear layer as one that reads constants at these columns."""
    bias = _find_bias_rows(layer, range(layer.size))
    return Reader(ParameterRows(str(layer.weight), layer.rows), columns, bias)


def _find_bias_rows(layer: Producer, outputs: Sequence[int]) -> ParameterRows | None:
    """Return the positions of outputs in the layer's bias, if it has one."""
    if layer.bias is None or layer.bias_rows is None:
        return None
    return ParameterRows(layer.bias, layer.bias_rows[list(outputs)])


def can_absorb_constants(ledger: Ledger, reading: LinearReading) -> bool:
    """Return True if the bias of the layer that reads can take over an added constant."""
    return ledger.producers[reading.reader].bias is not None and not reading.is_padded


# --- biases that move -----------------------------------------------------------------------


@dataclass(frozen=True)
class _ReaderKey:
    """Who reads an output, without the position at which it is read."""

    reading_type: type[Reading]
    is_key: bool
    reader: int | None = None
    is_padded: bool = False
    norm: int | None = None

    @classmethod
    def of(cls, use: Use) -> _ReaderKey:
        """Return who reads in a use."""
        reading = use.reading
        reading_type = type(reading)
        if isinstance(reading, LinearReading):
            return cls(reading_type, use.is_key, reader=reading.reader, is_padded=reading.is_padded)
        if isinstance(reading, FixedNormReading):
            return cls(reading_type, use.is_key, norm=reading.norm)
        return cls(reading_type, use.is_key)


def _group_by_readers(readers: Readers, number: int) -> list[list[Output]]:
    """Return groups of a producer's outputs that the same operations read, all of them linear."""
    producer = readers.ledger.producers[number]
    groups: dict[object, list[Output]] = {}
    for index in range(producer.size):
        output = Output(number, index)
        if output in readers.ledger.nonlinear or output not in readers.uses:
            continue
        if producer.weight is not None and readers.is_shared(producer, [index]):
            continue
        keys = [_ReaderKey.of(use) for use in readers.uses[output]]
        groups.setdefault(_summarize_readers(keys), []).append(output)
    return list(groups.values())


def _summarize_readers(keys: Sequence[_ReaderKey]) -> object:
    """Return a key that is equal for outputs with the same readers.

    Heads that share a key read it in several products, whose number does not matter.
    """
    single_keys = [key for key in keys if key.reading_type is not PairReading]
    has_repetition = len(set(single_keys)) < len(single_keys)
    return frozenset(keys), has_repetition


def _move_bias(walk: Walk, readers: Readers, outputs: list[Output]) -> Action | None:
    """Return the action on the bias of outputs with the same readers, if there is one."""
    producer = walk.ledger.producers[outputs[0].producer]
    source = producer.find_offset([output.number for output in outputs])
    if source is None:
        return None
    uses = readers.uses[outputs[0]]
    roles = {(type(use.reading), use.is_key) for use in uses}
    name = source.name
    if roles == {(PairReading, True)}:
        return bias_shift(len(outputs), [source], about=f"key bias {name}, which does nothing")
    if roles == {(BatchNormReading, False)}:
        about = f"bias {name} before a batch norm, which does nothing"
        return bias_shift(len(outputs), [source], about=about)
    if roles == {(FixedNormReading, False)} and len(uses) == 1:
        return _move_into_fixed_norm(walk, readers, outputs, source)
    if roles == {(LinearReading, False)}:
        return _move_into_layers(walk.ledger, readers, outputs, source)
    return None


def _find_positions(readers: Readers, outputs: list[Output], use_index: int) -> Tensor:
    """Return where outputs are read, each in its use with this index."""
    positions = [
        readers.uses[output][use_index].reading.find_position(output) for output in outputs
    ]
    return torch.tensor(positions)


def _move_into_fixed_norm(
    walk: Walk, readers: Readers, outputs: list[Output], source: Leg
) -> Action:
    """Return the shift of a bias into the shift of the batch norm that reads it."""
    reading = readers.uses[outputs[0]][0].reading
    assert isinstance(reading, FixedNormReading)
    norm = walk.fixed_norms[reading.norm].norm
    channels = _find_positions(readers, outputs, 0)
    about = f"bias {source.name} into {norm.shift}"
    return folded_shift(source, len(outputs), norm, channels, about)


def _move_into_layers(
    ledger: Ledger, readers: Readers, outputs: list[Output], source: Leg
) -> Action | None:
    """Return the shift of a bias into the biases of the layers that read it.

    None where one of these has no bias, or reads zeros around its input.
    """
    absorbing: list[tuple[Reader, int]] = []
    for use_index, use in enumerate(readers.uses[outputs[0]]):
        reading = use.reading
        if not isinstance(reading, LinearReading) or not can_absorb_constants(ledger, reading):
            return None
        columns = _find_positions(readers, outputs, use_index)
        absorbing.append((make_reader(ledger.producers[reading.reader], columns), 1))
    targets = ", ".join(dict.fromkeys(reader.require_bias().name for reader, _ in absorbing))
    about = f"shift of {source.name} into {targets}"
    return bias_shift(len(outputs), [source], absorbing, about=about)


# --- norms ----------------------------------------------------------------------------------


def _find_common_shift(
    readers: Readers, reading: NormReading | SoftmaxReading, params: Parameters
) -> Action | None:
    """Return the shift of all of a layer's outputs that a norm or a softmax removes."""
    source = readers.find_layer(reading.outputs)
    uses = readers.find_joint_uses(reading.outputs)
    if source is None or uses is None or len(uses) != 1:
        return None
    layer = source.producer
    # A shift that depends on the inputs must be removed for each sample.
    moves_weight = isinstance(reading, SoftmaxReading) or reading.is_per_sample
    width = 0
    weight = None
    if moves_weight:
        weight = ParameterRows(str(layer.weight), layer.rows[source.outputs])
        width = params[weight.name][0].numel()
    bias = _find_bias_rows(layer, source.outputs)
    if bias is not None:
        width += 1
    if weight is None and bias is None:
        return None
    operation = "softmax" if isinstance(reading, SoftmaxReading) else "norm"
    about = f"common shift of {layer.module}'s outputs before a {operation}"
    return common_shift(weight, bias, width, about)


def _shift_mean(ledger: Ledger, reading: LinearReading) -> Action | None:
    """Return the shift of a weight along which a layer norm's outputs do not vary."""
    number = reading.outputs[0].producer
    norm = ledger.producers[number]
    layer = ledger.producers[reading.reader]
    if norm.operation is not Operation.LAYER_NORM or layer.operation is not Operation.LINEAR:
        return None
    indices = [output.number for output in reading.outputs]
    if sorted(indices) != list(range(norm.size)):
        return None
    if any(output.producer != number for output in reading.outputs):
        return None
    if norm.bias is not None and layer.bias is None:
        return None
    columns = torch.tensor(reading.positions)[torch.tensor(indices).argsort()]
    about = f"mean direction of {norm.module or 'a layer norm'} in {layer.module}"
    return mean_shift(make_reader(layer, columns), norm.weight, norm.bias, about)
