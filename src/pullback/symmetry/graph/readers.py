"""Who reads the outputs of linear layers."""

from __future__ import annotations

from collections import Counter

from .ledger import Event, Ledger, Producer, Row


class Readers:
    """The events that each output takes part in, for outputs that nothing nonlinear reads."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.of: dict[Row, list[tuple[Event, bool]]] = {}
        for event in ledger.events:
            for row in event.rows:
                self.of.setdefault(row, []).append((event, False))
            if event.kind == "pair":
                for row in event.where:
                    self.of.setdefault(row, []).append((event, True))
        self._owners: Counter[tuple[str | None, int]] = Counter()
        for made in ledger.producers:
            self._owners.update((made.weight, int(r)) for r in made.rows)

    def shared(self, made: Producer, outputs: list[int]) -> bool:
        """Whether these rows of the weight are another layer's, too."""
        return any(self._owners[made.weight, int(made.rows[i])] > 1 for i in outputs)

    def clean(self, rows: tuple[Row, ...]) -> bool:
        """Whether only recorded events read these outputs."""
        return not any(r in self.ledger.touched for r in rows)

    def reading(self, p: int) -> list[tuple[Event, bool]] | None:
        """The events of a producer whose outputs are all read alike; None if touched."""
        rows = [(p, i) for i in range(len(self.ledger.producers[p].rows))]
        first = self.of.get(rows[0], [])
        alike = all(r not in self.ledger.touched and self.of.get(r, []) == first for r in rows)
        return first if alike else None

    def together(self, rows: tuple[Row, ...]) -> list[tuple[Event, bool]] | None:
        """The events of outputs that are always read together, in one order; else None."""
        events = self.of.get(rows[0], [])
        for event, second in events:
            read = event.where if second else event.rows
            if read != rows:
                return None
        return events if all(self.of.get(r) == events for r in rows) else None


def source_of(readers: Readers, rows: tuple[Row, ...]) -> tuple[Producer, list[int]] | None:
    """The layer whose outputs these are; norms and shared layers are no candidates."""
    made = readers.ledger.producers[rows[0][0]]
    if any(p != rows[0][0] for p, _ in rows) or made.kind not in ("linear", "conv"):
        return None
    outputs = [i for _, i in rows]
    if len(set(outputs)) != len(outputs) or readers.shared(made, outputs):
        return None
    return made, outputs
