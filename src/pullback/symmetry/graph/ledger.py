"""The layers that produce units, and a record of everything that reads their outputs.

A *producer* is a linear layer, a table, a norm's gain, or a sum of producers. Its outputs are
followed through the graph as long as they are only moved about. A *unit* is a number that stands
for an output together with its history: the products with other activations that it has passed.
Outputs that are read together and have one history can be mixed or shifted together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..actions.scaling import Leg
from .values import NO_UNIT


class Output(NamedTuple):
    """One output of a producer, by their numbers."""

    producer: int
    number: int


Outputs = tuple[Output, ...]


class Operation(Enum):
    """The operation that computes a producer's outputs."""

    LINEAR = "a product with a matrix"
    CONVOLUTION = "a convolution"
    TRANSPOSED_CONVOLUTION = "a transposed convolution"
    LAYER_NORM = "a layer norm over one axis, with or without a gain"
    GAIN = "a product with one number for each output"
    EMBEDDING = "rows of a table that tokens choose"
    TABLE = "a table with one vector for each position"
    SUM = "the sum of other producers and of inputs"


@dataclass
class Producer:
    """A linear layer, a table, a norm's gain and shift, or a sum.

    Attributes:
        operation: that computes the outputs.
        weight: the parameter with the layer's outputs along its first axis, for a transposed
            convolution along the second; None if it has none.
        rows: the position of each output along that axis.
        atoms: the label of each output.
        module: the name of the module that holds the weight.
        bias, bias_rows, bias_size: the bias, the position of each output in it, and its length,
            once the walk has met it.
        table: for embeddings and tables, the output that each entry of `weight` belongs to.
        terms: for sums, the producers that are added; None is an input.
    """

    operation: Operation
    weight: str | None
    rows: Tensor
    atoms: Tensor
    module: str = ""
    bias: str | None = None
    bias_rows: Tensor | None = None
    bias_size: int | None = None
    table: Tensor | None = None
    terms: tuple[int | None, ...] = ()

    @property
    def size(self) -> int:
        """The number of outputs."""
        return len(self.rows)

    def find_offset(self, outputs: Sequence[int]) -> Leg | None:
        """Return the table or bias to which a constant can be added for these outputs.

        The leg numbers its units as the outputs stand in the list. None if there is neither.
        """
        unit_of_output = torch.full((self.size,), -1)
        unit_of_output[list(outputs)] = torch.arange(len(outputs))
        if self.table is not None and self.weight is not None:
            return Leg(self.weight, torch.where(self.table < 0, -1, unit_of_output[self.table]), 1)
        if self.bias is None or self.bias_rows is None or self.bias_size is None:
            return None
        unit = torch.full((self.bias_size,), -1)
        unit[self.bias_rows] = unit_of_output
        return Leg(self.bias, unit, 1)


@dataclass(frozen=True)
class ProducerOutputs:
    """Some outputs of one producer.

    Attributes:
        producer: the layer.
        outputs: numbers of its outputs, in order.
    """

    producer: Producer
    outputs: list[int]

    @property
    def is_complete(self) -> bool:
        """Return True if these are all of the producer's outputs, in its own order."""
        return self.outputs == list(range(self.producer.size))


# --- readings: one class for each kind of operation that reads outputs -------------------------


@dataclass(frozen=True, eq=False)
class Reading:
    """Outputs that one operation reads together; it is linear in them or blind to their shifts.

    Attributes:
        outputs: in the order in which they are read.
        positions: of the outputs along the axis that the operation reads.
    """

    outputs: Outputs
    positions: tuple[int, ...]

    def find_position(self, output: Output) -> int:
        """Return the position at which an output is read."""
        return self.positions[self.outputs.index(output)]


@dataclass(frozen=True, eq=False)
class LinearReading(Reading):
    """A linear layer reads the outputs at its columns `positions`.

    Attributes:
        reader: the number of the layer.
        is_padded: whether zeros are put around or between the outputs, so that a constant is not
            read as one.
    """

    reader: int
    is_padded: bool = False


@dataclass(frozen=True, eq=False)
class PairReading(Reading):
    """Σ_i output_i·key_i is formed: queries against keys.

    Attributes:
        keys: the second factors, in order.
    """

    keys: Outputs


@dataclass(frozen=True, eq=False)
class NormReading(Reading):
    """A norm subtracts the mean of the outputs, and with it a shift common to all of them.

    Attributes:
        is_per_sample: whether the mean is that of each sample and position (a layer norm), so that
            the shift may depend on the inputs. A group norm's is a mean over positions.
    """

    is_per_sample: bool


class SoftmaxReading(Reading):
    """A softmax of the outputs does not change under a shift common to all of them."""


class BatchNormReading(Reading):
    """A batch norm removes any shift."""


@dataclass(frozen=True, eq=False)
class FixedNormReading(Reading):
    """A batch norm with fixed statistics reads the outputs at its channels `positions`.

    Attributes:
        norm: the number of the norm in `Walk.fixed_norms`.
    """

    norm: int


class SumReading(Reading):
    """The outputs are added to something else."""


class Use(NamedTuple):
    """The part that an output plays in a reading.

    `is_key` is true for the second factors of a `PairReading`.
    """

    reading: Reading
    is_key: bool

    def list_outputs(self) -> Outputs:
        """Return all outputs that play the same part."""
        if isinstance(self.reading, PairReading) and self.is_key:
            return self.reading.keys
        return self.reading.outputs


# --- the record -----------------------------------------------------------------------------


class _Unit(NamedTuple):
    """An output and its history.

    The history is at first the producer's number. Each operation that is passed makes it
    (number of the operation, history before, outputs that passed together).
    """

    output: Output
    history: Hashable


@dataclass
class Ledger:
    """The producers and readings of a graph, in the order of the walk.

    Attributes:
        producers: linear layers, tables, gains and sums.
        readings: operations that read their outputs and that shifts or matrices can pass.
        nonlinear: outputs that anything else reads.
    """

    producers: list[Producer] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    nonlinear: set[Output] = field(default_factory=set)
    _units: list[_Unit] = field(default_factory=list)
    _unit_numbers: dict[_Unit, int] = field(default_factory=dict)
    _call_count: int = 0

    def number_call(self) -> int:
        """Return a new number for one operation."""
        self._call_count += 1
        return self._call_count

    def add_producer(self, producer: Producer) -> Tensor:
        """Record a producer and return its units, (n,)."""
        self.producers.append(producer)
        number = len(self.producers) - 1
        units = [self._number_unit(Output(number, i), number) for i in range(producer.size)]
        return torch.tensor(units).long()

    def _number_unit(self, output: Output, history: Hashable) -> int:
        """Return the number of the unit with this output and history, which may be a new one."""
        unit = _Unit(output, history)
        if unit not in self._unit_numbers:
            self._unit_numbers[unit] = len(self._units)
            self._units.append(unit)
        return self._unit_numbers[unit]

    def find_output(self, unit: int) -> Output:
        """Return the output behind a unit."""
        return self._units[unit].output

    def mark_nonlinear(self, units: Tensor) -> None:
        """Record that something nonlinear reads these units."""
        for unit in units.unique().tolist():
            if unit != NO_UNIT:
                self.nonlinear.add(self.find_output(unit))

    def _group_by_history(self, units: Sequence[int]) -> dict[Hashable, list[int]]:
        """Return indices into a list of units, grouped by the units' history."""
        groups: dict[Hashable, list[int]] = {}
        for index, unit in enumerate(units):
            if unit != NO_UNIT:
                groups.setdefault(self._units[unit].history, []).append(index)
        return groups

    def pass_units(self, units: Sequence[int], call: int) -> list[int]:
        """Return the units that these become by an operation, which their histories then contain.

        The operation acts equally on all units with a common history.

        Args:
            units: before the operation.
            call: the operation's number.
        """
        passed = list(units)
        for history, indices in self._group_by_history(units).items():
            outputs = tuple(self.find_output(units[i]) for i in indices)
            new_history = (call, history, outputs)
            for i, output in zip(indices, outputs, strict=True):
                passed[i] = self._number_unit(output, new_history)
        return passed

    def add_readings(
        self,
        units: Tensor,
        positions: Sequence[int],
        make_reading: Callable[[Outputs, tuple[int, ...]], Reading],
    ) -> None:
        """Record a reading for each group of units (n,) with a common history.

        Args:
            units: that are read; entries without a unit are ignored.
            positions: at which they are read, n of them.
            make_reading: makes a reading of outputs and their positions.
        """
        unit_list = units.tolist()
        for indices in self._group_by_history(unit_list).values():
            for occurrences in _split_repetitions([unit_list[i] for i in indices]):
                chosen = [indices[k] for k in occurrences]
                outputs = tuple(self.find_output(unit_list[i]) for i in chosen)
                reading = make_reading(outputs, tuple(positions[i] for i in chosen))
                self.readings.append(reading)

    def add_pair(self, queries: Outputs, keys: Outputs) -> None:
        """Record that Σ_i query_i·key_i is formed, unless that is known."""
        pairs = [reading for reading in self.readings if isinstance(reading, PairReading)]
        if not any(pair.outputs == queries and pair.keys == keys for pair in pairs):
            positions = tuple(range(len(queries)))
            self.readings.append(PairReading(queries, positions, keys))

    def add_sum(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Record that units (n,) of two producers are added one by one, and return the sum's units.

        A side may also be something that no parameter shifts, all `NO_UNIT`. The result is None
        where a side is not all outputs of one producer in order.
        """
        terms: list[int | None] = []
        for side in (left, right):
            if bool((side == NO_UNIT).all()):
                terms.append(None)
                continue
            source = self.find_single_producer(side)
            if source is None or not source.is_complete:
                return None
            terms.append(self.find_output(int(side[0])).producer)
        rows = torch.arange(len(left))
        atoms = torch.zeros_like(rows)
        units = self.add_producer(Producer(Operation.SUM, None, rows, atoms, terms=tuple(terms)))
        for term in terms:
            if term is not None:
                outputs = tuple(Output(term, i) for i in range(len(left)))
                self.readings.append(SumReading(outputs, tuple(rows.tolist())))
        return units

    def find_single_producer(self, units: Tensor) -> ProducerOutputs | None:
        """Return the producer of units that come from one layer and have passed nothing since."""
        unit_list = units.tolist()
        if not unit_list or NO_UNIT in unit_list:
            return None
        records = [self._units[unit] for unit in unit_list]
        number = records[0].output.producer
        for record in records:
            if record.output.producer != number or record.history != number:
                return None
        return ProducerOutputs(self.producers[number], [r.output.number for r in records])


def _split_repetitions(units: Sequence[int]) -> list[list[int]]:
    """Return indices of first occurrences, then of second ones, and so on.

    Units are read repeatedly where attention heads share keys or values.
    """
    rounds: list[list[int]] = []
    counts: dict[int, int] = {}
    for index, unit in enumerate(units):
        occurrence = counts.get(unit, 0)
        if occurrence == len(rounds):
            rounds.append([])
        rounds[occurrence].append(index)
        counts[unit] = occurrence + 1
    return rounds
