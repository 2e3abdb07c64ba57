"""Shifts along residual streams: layers whose outputs are added.

Add s_p·c to the bias (or table) of each layer p. A sum then holds t = Σ t_terms, and a layer
t_p = s_p. Every reader that cannot remove a constant demands t = 0. The whole numbers s that solve
these equations are symmetries, for any vector c. A layer norm or a softmax demands nothing if c is
a multiple of the vector of ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..actions.action import Parameters
from ..actions.components import connected_components
from ..actions.scaling import Leg
from ..actions.shifts import ParameterRows, Reader, Shift, bias_shift, common_shift
from .integer_kernel import find_integer_kernel
from .ledger import (
    BatchNormReading,
    Ledger,
    LinearReading,
    NormReading,
    Operation,
    PairReading,
    SoftmaxReading,
    SumReading,
    Use,
)
from .readers import Readers
from .shifts import can_absorb_constants, make_reader

#: s by the name of a bias or table
Multiples = dict[str, int]


@dataclass(frozen=True)
class _Solution:
    """A shift of a stream.

    Attributes:
        multiples: s, without zeros.
        is_uniform: whether only multiples of the vector of ones may be added.
    """

    multiples: Multiples
    is_uniform: bool


def find_stream_shifts(readers: Readers, params: Parameters) -> Iterator[Shift]:
    """Yield the shifts of every group of layers that sums connect."""
    for members in _find_streams(readers.ledger):
        stream = _Stream(readers, members)
        for solution in stream.solve():
            yield stream.make_shift(solution)
        yield from _shift_unseen_weights(readers, members, params)


def _find_streams(ledger: Ledger) -> list[list[int]]:
    """Return producers that are connected by sums, in order.

    A layer that is used twice connects both uses, because it has one bias.
    """
    keys: list[list[object]] = []
    for number, producer in enumerate(ledger.producers):
        producer_keys: list[object] = [number]
        producer_keys.extend(term for term in producer.terms if term is not None)
        offset = producer.find_offset(range(producer.size))
        if offset is not None:
            producer_keys.append(offset.name)
        keys.append(producer_keys)
    sums = {number for number, producer in enumerate(ledger.producers) if producer.terms}
    return [c for c in connected_components(keys) if not sums.isdisjoint(c)]


class _Stream:
    """Layers that sums connect.

    Args:
        readers: of the graph.
        members: numbers of producers, in order.
    """

    def __init__(self, readers: Readers, members: Sequence[int]) -> None:
        self._readers = readers
        self._ledger = readers.ledger
        self._members = members
        self._width = max(self._ledger.producers[number].size for number in members)
        #: biases and tables that constants can be added to, by producer
        self._offsets = self._find_offsets()

    def _find_offsets(self) -> dict[int, Leg]:
        """Return the bias or table of each member that has one of full width.

        Parameters that are weights elsewhere are left out, and those that two members use in
        different ways.
        """
        unusable = {p.weight for p in self._ledger.producers if p.table is None}
        offsets: dict[int, Leg] = {}
        first_offsets: dict[str, Leg] = {}
        for number in self._members:
            producer = self._ledger.producers[number]
            offset = producer.find_offset(range(producer.size))
            if offset is None:
                continue
            offsets[number] = offset
            first = first_offsets.setdefault(offset.name, offset)
            if producer.size != self._width or not torch.equal(offset.unit, first.unit):
                unusable.add(offset.name)
        return {number: o for number, o in offsets.items() if o.name not in unusable}

    def _propagate(self, multiples: Multiples) -> dict[int, int]:
        """Return t of every member, for s by name."""
        constants: dict[int, int] = {}
        for number in self._members:
            constant = 0
            if number in self._offsets:
                constant = multiples.get(self._offsets[number].name, 0)
            for term in self._ledger.producers[number].terms:
                if term is not None:
                    constant += constants[term]
            constants[number] = constant
        return constants

    def solve(self) -> list[_Solution]:
        """Return a basis of the whole-numbered s, those for any vector c first."""
        names = list(dict.fromkeys(offset.name for offset in self._offsets.values()))
        columns = [self._propagate({name: 1}) for name in names]
        general = self._find_kernel(columns, uniform=False)
        basis = list(general)
        for vector in self._find_kernel(columns, uniform=True):
            extended = torch.tensor([*basis, vector], dtype=torch.float64)
            if int(torch.linalg.matrix_rank(extended)) > len(basis):
                basis.append(vector)
        solutions = []
        for i, vector in enumerate(basis):
            multiples = {name: s for name, s in zip(names, vector, strict=True) if s}
            solutions.append(_Solution(multiples, is_uniform=i >= len(general)))
        return solutions

    def _find_kernel(self, columns: list[dict[int, int]], *, uniform: bool) -> list[list[int]]:
        """Return the s for which t = 0 wherever a reader demands it."""
        rows = []
        for number in self._members:
            if not self._is_absorbed(number, uniform=uniform):
                rows.append([column[number] for column in columns])
        return find_integer_kernel(rows, len(columns))

    def _is_absorbed(self, number: int, *, uniform: bool) -> bool:
        """Return True if every reader of a producer can absorb an added constant."""
        uses = self._readers.find_common_uses(number)
        if uses is None:
            return False
        return all(_can_absorb(self._ledger, use, uniform=uniform) for use in uses)

    def make_shift(self, solution: _Solution) -> Shift:
        """Return the shift of a solution."""
        offsets = {offset.name: offset for offset in self._offsets.values()}
        legs = []
        for name, offset in offsets.items():
            if name in solution.multiples:
                legs.append(Leg(name, offset.unit, solution.multiples[name]))
        absorbing = self._list_absorbing_layers(self._propagate(solution.multiples))
        names = [leg.name for leg in legs]
        names.extend(reader.require_bias().name for reader, _ in absorbing)
        about = _describe(list(dict.fromkeys(names)), solution.is_uniform)
        return bias_shift(self._width, legs, absorbing, solution.is_uniform, about)

    def _list_absorbing_layers(self, constants: dict[int, int]) -> list[tuple[Reader, int]]:
        """Return the linear layers that read t·c for t other than 0, and t."""
        absorbing = []
        for number in self._members:
            if not constants[number]:
                continue
            for use in self._readers.find_common_uses(number) or []:
                reading = use.reading
                if isinstance(reading, LinearReading):
                    columns = torch.tensor(reading.positions)
                    order = torch.tensor([output.number for output in reading.outputs]).argsort()
                    layer = self._ledger.producers[reading.reader]
                    absorbing.append((make_reader(layer, columns[order]), constants[number]))
        return absorbing


def _describe(names: list[str], is_uniform: bool) -> str:
    """Return a description of a shift of the first parameter into the others."""
    about = f"shift of {names[0]}"
    if is_uniform:
        about = f"uniform {about}"
    if len(names) == 1:
        return f"{about}, which does nothing"
    return f"{about} into {', '.join(names[1:3])}"


def _can_absorb(ledger: Ledger, use: Use, *, uniform: bool) -> bool:
    """Return True if a use removes an added constant, or one that is uniform."""
    reading = use.reading
    if isinstance(reading, LinearReading):
        return can_absorb_constants(ledger, reading)
    if isinstance(reading, SoftmaxReading):
        return uniform
    if isinstance(reading, NormReading):
        return uniform and reading.is_per_sample
    if isinstance(reading, PairReading):
        return use.is_key
    return isinstance(reading, (SumReading, BatchNormReading))


def _shift_unseen_weights(
    readers: Readers, members: Sequence[int], params: Parameters
) -> Iterator[Shift]:
    """Yield common shifts of the weights of layers that only layer norms read, perhaps in sums."""
    is_unseen: dict[int, bool] = {}
    for number in reversed(members):
        sums = [q for q in members if number in readers.ledger.producers[q].terms]
        sums_are_unseen = all(is_unseen[q] for q in sums)
        is_unseen[number] = sums_are_unseen and _only_norms_read(readers, number, bool(sums))
        layer = readers.ledger.producers[number]
        if not is_unseen[number] or layer.operation is not Operation.LINEAR or layer.weight is None:
            continue
        if not readers.is_shared(layer, range(layer.size)):
            width = params[layer.weight][0].numel()
            about = f"common shift of {layer.module}'s outputs before a norm"
            yield common_shift(ParameterRows(layer.weight, layer.rows), None, width, about)


def _only_norms_read(readers: Readers, number: int, is_added: bool) -> bool:
    """Return True if norms and sums read all outputs of a producer, and at least one of them does.

    Args:
        readers: of the graph.
        number: of the producer.
        is_added: whether a sum reads it.
    """
    uses = readers.find_common_uses(number)
    if uses is None:
        return False
    has_layer_norm = False
    for use in uses:
        if not isinstance(use.reading, (NormReading, SumReading)):
            return False
        if isinstance(use.reading, NormReading) and use.reading.is_per_sample:
            has_layer_norm = True
    return has_layer_norm or is_added
