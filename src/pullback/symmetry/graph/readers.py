"""Questions to a complete ledger: who reads an output, and which outputs are read together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .ledger import (
    Ledger,
    Operation,
    Output,
    Outputs,
    PairReading,
    Producer,
    ProducerOutputs,
    Reading,
    Use,
)


class Readers:
    """The readings that each output takes part in.

    Attributes:
        ledger: the record that is asked.
        uses: by output, in the order of the walk.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.uses: dict[Output, list[Use]] = {}
        for reading in ledger.readings:
            self._add_uses(reading.outputs, reading, is_key=False)
            if isinstance(reading, PairReading):
                self._add_uses(reading.keys, reading, is_key=True)
        self._owner_counts: Counter[tuple[str | None, int]] = Counter()
        for producer in ledger.producers:
            self._owner_counts.update((producer.weight, int(row)) for row in producer.rows)

    def _add_uses(self, outputs: Outputs, reading: Reading, *, is_key: bool) -> None:
        for output in outputs:
            self.uses.setdefault(output, []).append(Use(reading, is_key))

    def is_shared(self, producer: Producer, outputs: Sequence[int]) -> bool:
        """Return True if another layer uses one of these rows of the weight, too."""
        rows = [int(producer.rows[i]) for i in outputs]
        return any(self._owner_counts[producer.weight, row] > 1 for row in rows)

    def find_common_uses(self, number: int) -> list[Use] | None:
        """Return the uses of all outputs of a producer.

        None where they differ, or where something nonlinear reads one of them.
        """
        outputs = [Output(number, i) for i in range(self.ledger.producers[number].size)]
        uses = self.uses.get(outputs[0], [])
        for output in outputs:
            if output in self.ledger.nonlinear or self.uses.get(output, []) != uses:
                return None
        return uses

    def find_joint_uses(self, outputs: Outputs) -> list[Use] | None:
        """Return the uses of outputs that are always read together, in this order; else None."""
        uses = self.uses.get(outputs[0], [])
        if any(use.list_outputs() != outputs for use in uses):
            return None
        for output in outputs:
            if output in self.ledger.nonlinear or self.uses.get(output) != uses:
                return None
        return uses

    def find_layer(self, outputs: Outputs) -> ProducerOutputs | None:
        """Return the linear layer or convolution that these are distinct outputs of.

        None for norms, and for rows of a weight that several layers share.
        """
        number = outputs[0].producer
        producer = self.ledger.producers[number]
        if producer.operation not in (Operation.LINEAR, Operation.CONVOLUTION):
            return None
        if len({output.producer for output in outputs}) > 1:
            return None
        indices = [output.number for output in outputs]
        if len(set(indices)) != len(indices) or self.is_shared(producer, indices):
            return None
        return ProducerOutputs(producer, indices)
