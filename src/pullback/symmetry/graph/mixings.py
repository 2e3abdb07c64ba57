"""Invertible matrices between layers with nothing nonlinear between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..actions.components import connected_components
from ..actions.mixing import Mixing
from .ledger import (
    LinearReading,
    Operation,
    Output,
    Outputs,
    PairReading,
    Producer,
    SumReading,
)
from .readers import Readers
from .walk import Walk

#: layers whose outputs a matrix can mix
_MIXABLE_OPERATIONS = (
    Operation.LINEAR,
    Operation.CONVOLUTION,
    Operation.TRANSPOSED_CONVOLUTION,
    Operation.EMBEDDING,
    Operation.SUM,
)


@dataclass(frozen=True)
class _Candidate:
    """A mixing and the outputs that it mixes."""

    mixing: Mixing
    members: list[Outputs]


def find_mixings(walk: Walk, readers: Readers) -> list[Mixing]:
    """Return one mixing for each set of outputs that only linear layers read, or only products.

    The scales of outputs that are mixed are part of the mixing: they are fixed in the walk.
    """
    candidates = [*_find_between_layers(readers), *_find_between_factors(readers)]
    for candidate in candidates:
        for outputs in candidate.members:
            for output in outputs:
                producer = walk.ledger.producers[output.producer]
                walk.scales.fix(producer.atoms[output.number])
    return [candidate.mixing for candidate in candidates]


# --- between linear layers ------------------------------------------------------------------


def _find_between_layers(readers: Readers) -> list[_Candidate]:
    """Return mixings of outputs of linear layers that only linear layers read."""
    candidates: list[_Candidate] = []
    visited: set[Outputs] = set()
    for reading in readers.ledger.readings:
        outputs = reading.outputs
        if not isinstance(reading, LinearReading) or outputs in visited or len(outputs) < 2:
            continue
        members = _collect_members(readers, outputs)
        if members is None:
            visited.add(outputs)
            continue
        visited.update(members)
        mixing = _make_mixing(readers, members)
        if mixing is not None:
            candidates.append(_Candidate(mixing, members))
    return candidates


def _collect_members(readers: Readers, outputs: Outputs) -> list[Outputs] | None:
    """Return all outputs that one matrix must mix, because sums connect them.

    None if some of them cannot be mixed.
    """
    members: dict[Outputs, None] = {}
    queue = [outputs]
    while queue:
        member = queue.pop()
        if member in members:
            continue
        members[member] = None
        if not _can_be_mixed(readers, member):
            return None
        neighbors = _find_neighbors(readers, member)
        if neighbors is None:
            return None
        queue += neighbors
    return list(members)


def _can_be_mixed(readers: Readers, outputs: Outputs) -> bool:
    """Return True if these are outputs of one layer, and only linear layers and sums read them."""
    if len({output.producer for output in outputs}) > 1 or len(set(outputs)) != len(outputs):
        return False
    producer = readers.ledger.producers[outputs[0].producer]
    indices = [output.number for output in outputs]
    if producer.operation not in _MIXABLE_OPERATIONS or None in producer.terms:
        return False
    if producer.weight and readers.is_shared(producer, indices):
        return False
    uses = readers.find_joint_uses(outputs)
    if uses is None:
        return False
    return all(_can_undo(readers, use.reading) for use in uses)


def _can_undo(readers: Readers, reading: object) -> bool:
    """Return True if what reads outputs can undo a matrix: a sum, or a weight that is used once."""
    if isinstance(reading, SumReading):
        return True
    if not isinstance(reading, LinearReading):
        return False
    producers = readers.ledger.producers
    weight = producers[reading.reader].weight
    # One matrix would have to serve several uses of the weight.
    return sum(producer.weight == weight for producer in producers) == 1


def _find_neighbors(readers: Readers, outputs: Outputs) -> list[Outputs] | None:
    """Return the outputs of sums and terms that are mixed where these are.

    None where only some of a producer's outputs would be mixed in a sum.
    """
    number = outputs[0].producer
    producers = readers.ledger.producers
    numbers: list[int] = [q for q, other in enumerate(producers) if number in other.terms]
    numbers.extend(term for term in producers[number].terms if term is not None)
    if not numbers:
        return []
    if [output.number for output in outputs] != list(range(producers[number].size)):
        return None
    return [_list_outputs(neighbor, len(outputs)) for neighbor in numbers]


def _list_outputs(producer: int, size: int) -> Outputs:
    """Return the first outputs of a producer."""
    return tuple(Output(producer, i) for i in range(size))


class _PositionSet:
    """Positions in parameters without repetitions, in the order in which they were added."""

    def __init__(self) -> None:
        self._positions: dict[tuple[str, tuple[int, ...]], None] = {}

    def add(self, name: str, positions: Iterable[int]) -> None:
        """Add positions along an axis of a parameter."""
        self._positions[name, tuple(positions)] = None

    @property
    def names(self) -> list[str]:
        """The parameters, each once."""
        return list(dict.fromkeys(name for name, _ in self._positions))

    def has_overlaps(self) -> bool:
        """Return True if a position of a parameter occurs twice."""
        distinct: set[tuple[str, int]] = set()
        for name, positions in self._positions:
            for position in positions:
                if (name, position) in distinct:
                    return True
                distinct.add((name, position))
        return False

    def list_tensors(self) -> list[tuple[str, Tensor]]:
        """Return (name, positions) as `Mixing` takes them."""
        return [(name, torch.tensor(group)) for name, group in self._positions]


@dataclass
class _Sides:
    """What a matrix multiplies.

    Attributes:
        into: rows of weights and biases that compute the outputs.
        into_columns: columns of transposed convolutions that compute them.
        tables: columns of tables.
        out: columns of weights that read the outputs.
        out_rows: rows of transposed convolutions that read them.
    """

    into: _PositionSet = field(default_factory=_PositionSet)
    into_columns: _PositionSet = field(default_factory=_PositionSet)
    tables: _PositionSet = field(default_factory=_PositionSet)
    out: _PositionSet = field(default_factory=_PositionSet)
    out_rows: _PositionSet = field(default_factory=_PositionSet)

    @property
    def producer_names(self) -> list[str]:
        """The parameters that compute the outputs, weights first."""
        return [*self.into_columns.names, *self.into.names, *self.tables.names]

    @property
    def reader_names(self) -> list[str]:
        """The weights that read the outputs."""
        return [*self.out.names, *self.out_rows.names]

    def add_producer(self, producer: Producer, outputs: list[int]) -> None:
        """Add what computes some outputs of a layer."""
        if producer.operation is Operation.EMBEDDING:
            self.tables.add(str(producer.weight), producer.rows[outputs].tolist())
            return
        for name, positions in _list_rows(producer, outputs):
            side = self.into
            is_transposed = producer.operation is Operation.TRANSPOSED_CONVOLUTION
            if is_transposed and name == producer.weight:
                side = self.into_columns
            side.add(name, positions.tolist())

    def add_reader(self, reader: Producer, positions: Iterable[int]) -> None:
        """Add what a layer reads outputs with."""
        side = self.out
        if reader.operation is Operation.TRANSPOSED_CONVOLUTION:
            side = self.out_rows
        side.add(str(reader.weight), positions)

    def make_mixing(self, size: int) -> Mixing | None:
        """Return the action of an invertible matrix; None where no layer can undo it."""
        if not self.reader_names or self.out.has_overlaps() or self.out_rows.has_overlaps():
            return None
        out = [(name, columns, False) for name, columns in self.out.list_tensors()]
        out += [(name, rows, True) for name, rows in self.out_rows.list_tensors()]
        readers = ", ".join(self.reader_names)
        return Mixing(
            size,
            self.into.list_tensors(),
            out,
            f"GL({size}) between {self.producer_names[0]} and {readers}",
            [*self.tables.list_tensors(), *self.into_columns.list_tensors()],
        )


def _make_mixing(readers: Readers, members: list[Outputs]) -> Mixing | None:
    """Return the mixing of outputs of linear layers that only linear layers read."""
    producers = readers.ledger.producers
    sides = _Sides()
    for outputs in members:
        sides.add_producer(producers[outputs[0].producer], [o.number for o in outputs])
        for use in readers.find_joint_uses(outputs) or ():
            if isinstance(use.reading, LinearReading):
                sides.add_reader(producers[use.reading.reader], use.reading.positions)
    return sides.make_mixing(len(members[0]))


def _list_rows(producer: Producer, outputs: list[int]) -> list[tuple[str, Tensor]]:
    """Return the positions in a layer's weight and bias that compute some of its outputs."""
    rows: list[tuple[str, Tensor]] = []
    if producer.weight is not None:
        rows.append((producer.weight, producer.rows[outputs]))
    if producer.bias is not None and producer.bias_rows is not None:
        rows.append((producer.bias, producer.bias_rows[outputs]))
    return rows


# --- between the factors of a product -------------------------------------------------------


def _find_between_factors(readers: Readers) -> list[_Candidate]:
    """Return mixings of queries against keys; several heads may share either."""
    pairs = [
        reading
        for reading in readers.ledger.readings
        if isinstance(reading, PairReading) and len(reading.outputs) > 1
    ]
    candidates: list[_Candidate] = []
    factors = [[("query", pair.outputs), ("key", pair.keys)] for pair in pairs]
    for component in connected_components(factors):
        queries = list(dict.fromkeys(pairs[i].outputs for i in component))
        keys = list(dict.fromkeys(pairs[i].keys for i in component))
        mixing = _make_pair_mixing(readers, queries, keys)
        if mixing is not None:
            candidates.append(_Candidate(mixing, [*queries, *keys]))
    return candidates


def _make_pair_mixing(
    readers: Readers, queries: list[Outputs], keys: list[Outputs]
) -> Mixing | None:
    """Return the mixing q ← M q, k ← M⁻ᵀ k."""
    query_rows = _list_factor_rows(readers, queries, are_keys=False)
    key_rows = _list_factor_rows(readers, keys, are_keys=True)
    if query_rows is None or key_rows is None:
        return None
    size = len(queries[0])
    return Mixing(
        size,
        query_rows,
        [(name, rows, True) for name, rows in key_rows],
        f"GL({size}) between query {query_rows[0][0]} and key {key_rows[0][0]}",
    )


def _list_factor_rows(
    readers: Readers, factors: list[Outputs], *, are_keys: bool
) -> list[tuple[str, Tensor]] | None:
    """Return the rows of the layers that compute queries, or keys.

    None where something else reads them, too.
    """
    rows: list[tuple[str, Tensor]] = []
    for outputs in factors:
        source = readers.find_layer(outputs)
        uses = readers.find_joint_uses(outputs)
        if source is None or uses is None:
            return None
        for use in uses:
            if not isinstance(use.reading, PairReading) or use.is_key != are_keys:
                return None
        rows.extend(_list_rows(source.producer, source.outputs))
    return rows
