"""Biases of parts of layers that are only ever added up, as in the gates of a recurrent cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from ..actions.scaling import Leg
from ..actions.shifts import StreamShift
from ..graph.ledger import Ledger, Row
from ..graph.readers import Readers

Entry = tuple[str, int]  # of a bias


def exchanges(ledger: Ledger) -> Iterator[StreamShift]:
    """b ← b + c and b' ← b' − c, where outputs with b and b' only meet in sums with each other."""
    partners: dict[Entry, set[Entry]] = {}
    for left, right in ledger.added:
        for one, two in zip(left, right, strict=True):
            entries = _entry(ledger, one), _entry(ledger, two)
            if entries[0] is not None and entries[1] is not None:
                partners.setdefault(entries[0], set()).add(entries[1])
                partners.setdefault(entries[1], set()).add(entries[0])
    for entry in _read_elsewhere(ledger):
        partners.pop(entry, None)
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for one, others in partners.items():
        two = next(iter(others))
        if len(others) == 1 and one < two and partners.get(two) == {one} and one[0] != two[0]:
            found.setdefault((one[0], two[0]), []).append((one[1], two[1]))
    sizes = {made.bias: made.bias_size for made in ledger.producers}
    for (first, second), pairs in found.items():
        legs = []
        for name, side, power in ((first, 0, 1), (second, 1, -1)):
            unit = torch.full((int(sizes[name] or 0),), -1)
            unit[[pair[side] for pair in pairs]] = torch.arange(len(pairs))
            legs.append(Leg(name, unit, power))
        yield StreamShift(len(pairs), legs, about=f"shift of {first} into {second}")


def _entry(ledger: Ledger, row: Row) -> Entry | None:
    made = ledger.producers[row[0]]
    if made.bias is None or made.bias_rows is None:
        return None
    return made.bias, int(made.bias_rows[row[1]])


def _read_elsewhere(ledger: Ledger) -> Iterator[Entry]:
    """Entries of biases whose outputs something else reads, too."""
    sums = Counter(row for sides in ledger.added for side in sides for row in side)
    events = Readers(ledger).of
    for row in {*ledger.touched, *events}:
        if row in events or ledger.touched[row] != sums[row]:
            entry = _entry(ledger, row)
            if entry is not None:
                yield entry
