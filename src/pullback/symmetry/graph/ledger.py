"""What a walk through the graph keeps: labels of tensors, layers that produce units, readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..actions.charts import ParameterView
from ..actions.scaling import Leg
from .scales import FIXED, ZERO, collapse

#: an entry that is no linear layer's output any more
NONE = -1


@dataclass(frozen=True)
class Act:
    """An activation or a constant.

    Attributes:
        scale: the label of each entry (see `Scales`), of the tensor's shape.
        unit: which output of which linear layer an entry is, as long as it was only moved about.
    """

    scale: Tensor
    unit: Tensor

    @classmethod
    def of(cls, scale: Tensor, shape: Sequence[int], unit: Tensor | None = None) -> Act:
        """Labels broadcast to a shape."""
        unit = torch.tensor(NONE) if unit is None else unit
        return cls(scale.expand(tuple(shape)), unit.expand(tuple(shape)))

    @classmethod
    def constant(cls, shape: Sequence[int], *, zero: bool = False) -> Act:
        """A tensor that no parameter enters."""
        return cls.of(torch.tensor(ZERO if zero else FIXED), shape)

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.scale.shape

    def moved(self, move: Callable[[Tensor], Tensor]) -> Act:
        """The entries rearranged."""
        return Act(move(self.scale), move(self.unit))

    def plain(self) -> Act:
        """The same scales, of entries that are no layer's outputs any more."""
        return Act.of(self.scale, self.shape)


@dataclass(frozen=True)
class Ref:
    """A view of a parameter: the coordinates of each entry in it.

    Attributes:
        name: the parameter.
        sizes: its shape.
        coords: one tensor of the view's shape for each axis of the parameter.
        view: the view's shape.
        factor: the number by which its entries are multiplied.
    """

    name: str
    sizes: tuple[int, ...]
    coords: tuple[Tensor, ...]
    view: tuple[int, ...]
    factor: float = 1.0

    @classmethod
    def whole(cls, name: str, sizes: Sequence[int]) -> Ref:
        """The parameter itself."""
        sizes = tuple(sizes)
        coords = torch.meshgrid(*map(torch.arange, sizes), indexing="ij") if sizes else ()
        return cls(name, sizes, tuple(coords), sizes)

    @property
    def shape(self) -> torch.Size:
        """Of the view."""
        return torch.Size(self.view)

    @property
    def complete(self) -> bool:
        """Whether the view is the parameter itself."""
        whole = Ref.whole(self.name, self.sizes)
        return self.view == self.sizes and all(map(torch.equal, self.coords, whole.coords))

    def moved(self, move: Callable[[Tensor], Tensor]) -> Ref:
        """The entries rearranged."""
        coords = tuple(move(c) for c in self.coords)
        view = coords[0].shape if coords else move(torch.zeros(self.view)).shape
        return replace(self, coords=coords, view=tuple(view))

    def times(self, number: float) -> Ref:
        """The entries multiplied by a number other than 0."""
        return replace(self, factor=self.factor * number)

    def places(self) -> Tensor:
        """The place of each entry in the flattened parameter, size 1 where unchanging."""
        out = torch.zeros([1] * len(self.view), dtype=torch.long)
        for n, c in zip(self.sizes, self.coords, strict=True):
            out = out * n + collapse(c)
        return out

    def placed(self, labels: Tensor) -> Tensor:
        """Labels of the view's entries as an array on the parameter, size 1 where unchanging.

        Entries outside the view get −1.
        """
        small = collapse(labels.expand(self.view))
        coords = [collapse(c) for c in self.coords]
        axes = {a for a in range(small.ndim) if small.shape[a] > 1}
        while True:
            dims = {d for d, c in enumerate(coords) if any(c.shape[a] > 1 for a in axes)}
            more = {a for d in dims for a in range(small.ndim) if coords[d].shape[a] > 1}
            if more <= axes:
                break
            axes |= more
        target = [self.view[a] if a in axes else 1 for a in range(small.ndim)]
        out = torch.full([n if d in dims else 1 for d, n in enumerate(self.sizes)], -1)
        zero = torch.zeros((), dtype=torch.long)
        index = tuple(
            coords[d].expand(target) if d in dims else zero for d in range(len(self.sizes))
        )
        if not self.sizes:
            return small.reshape(())
        out[index] = small.expand(target)
        return out

    def region(self) -> Tensor:
        """Which entries along the parameter's first axis the view has: (sizes[0],) of bool."""
        if not self.sizes:
            return torch.ones(1, dtype=torch.bool)
        mask = torch.zeros(self.sizes[0], dtype=torch.bool)
        mask[collapse(self.coords[0]).flatten()] = True
        return mask


Value = Act | Ref


Row = tuple[int, int]  # (producer, output)


@dataclass
class Producer:
    """A linear layer, or a norm's gain and shift.

    Attributes:
        kind: "linear", "conv", "layer_norm", "gain", "embedding", "table",
            "sum".
        weight: the parameter with the layer's outputs along its first axis; None if it has none.
        rows: where output i stands along that axis.
        atoms: the label of each output.
        bias, bias_rows: the same for the bias, once it was met.
        table: for embeddings, the output that each entry of `weight` belongs to.
        terms: for sums, the producers that are added; None is an input.
    """

    kind: str
    weight: str | None
    rows: Tensor
    atoms: Tensor
    bias: str | None = None
    bias_rows: Tensor | None = None
    bias_size: int | None = None
    about: str = ""
    table: Tensor | None = None
    terms: tuple[int | None, ...] = ()

    def source(self, outputs: Sequence[int]) -> Leg | None:
        """What a constant can be added to for these outputs, counted from 0; None if nothing."""
        place = torch.full((len(self.rows),), -1)
        place[list(outputs)] = torch.arange(len(outputs))
        if self.table is not None and self.weight is not None:
            return Leg(self.weight, torch.where(self.table < 0, -1, place[self.table]), 1)
        if self.bias is None or self.bias_rows is None or self.bias_size is None:
            return None
        unit = torch.full((self.bias_size,), -1)
        unit[self.bias_rows] = place
        return Leg(self.bias, unit, 1)


@dataclass(eq=False)
class Reading:
    """Outputs (producer, row) that are read in one go by something linear in them.

    Attributes:
        kind: "linear": columns `at` of producer `reader`; "pair": summed against the rows `where`;
            "norm", "softmax": a common shift is taken away; "null": any shift is; "fold": a batch
            norm with fixed statistics; "sum": added to something.
        rows: the outputs, in order.
        where: depends on kind.
    """

    kind: str
    rows: tuple[Row, ...]
    where: Any = None


@dataclass
class Ledger:
    """The layers that produce units, and the events that read them."""

    producers: list[Producer] = field(default_factory=list)
    events: list[Reading] = field(default_factory=list)
    touched: Counter[Row] = field(default_factory=Counter)
    _units: list[tuple[Row, Any]] = field(default_factory=list)
    _number: dict[tuple[Row, Any], int] = field(default_factory=dict)
    _calls: int = 0

    def call(self) -> int:
        """A number for one operation."""
        self._calls += 1
        return self._calls

    def produce(self, producer: Producer) -> Tensor:
        """The units (n,) of a new producer."""
        self.producers.append(producer)
        p = len(self.producers) - 1
        return torch.tensor([self._unit((p, i), p) for i in range(len(producer.rows))]).long()

    def _unit(self, row: Row, tag: Any) -> int:
        key = (row, tag)
        if key not in self._number:
            self._number[key] = len(self._units)
            self._units.append(key)
        return self._number[key]

    def row(self, unit: int) -> Row:
        """The producer and output behind a unit."""
        return self._units[unit][0]

    def touch(self, units: Tensor) -> None:
        """Something nonlinear reads these."""
        self.touched.update(self.row(u) for u in units.unique().tolist() if u != NONE)

    def blocks(self, units: Sequence[int]) -> dict[Any, list[int]]:
        """Places in a list of units that had the same history, by that history."""
        out: dict[Any, list[int]] = {}
        for place, unit in enumerate(units):
            if unit != NONE:
                out.setdefault(self._units[unit][1], []).append(place)
        return out

    def passed(self, units: Sequence[int], call: int) -> list[int]:
        """Units after an operation that acts equally on those with a common history."""
        out = list(units)
        for tag, places in self.blocks(units).items():
            after = (call, tag, tuple(self.row(units[i]) for i in places))
            for i in places:
                out[i] = self._unit(self.row(units[i]), after)
        return out

    def read(self, kind: str, units: Tensor, where: Sequence[Any], **more: Any) -> None:
        """An event for each block of the units (n,) with their places; others are left alone."""
        listed = units.tolist()
        for places in self.blocks(listed).values():
            for again in _without_repetition([listed[i] for i in places]):
                chosen = [places[i] for i in again]
                rows = tuple(self.row(listed[i]) for i in chosen)
                self.events.append(Reading(kind, rows, {"at": [where[i] for i in chosen], **more}))

    def pair(self, left: tuple[Row, ...], right: tuple[Row, ...]) -> None:
        """Σ_i left_i·right_i is formed: queries against keys."""
        if not any(e.kind == "pair" and e.rows == left and e.where == right for e in self.events):
            self.events.append(Reading("pair", left, right))

    def add(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Outputs (n,) of two layers are added, one by one: the sum's own; None if not so simple.

        A side may also be something that no parameter shifts, all `NONE`.
        """
        terms: list[int | None] = []
        for side in (left, right):
            if bool((side == NONE).all()):
                terms.append(None)
                continue
            found = self.one_producer(side)
            if found is None or found[1] != list(range(len(found[0].rows))):
                return None
            terms.append(self.row(int(side[0]))[0])
        rows = torch.arange(len(left))
        made = self.produce(Producer("sum", None, rows, torch.zeros_like(rows), terms=tuple(terms)))
        for term in terms:
            if term is not None:
                outputs = tuple((term, i) for i in range(len(left)))
                self.events.append(Reading("sum", outputs, {"at": rows.tolist()}))
        return made

    def one_producer(self, units: Tensor) -> tuple[Producer, list[int]] | None:
        """The producer and outputs of units that come from one and went through nothing."""
        listed = units.tolist()
        if not listed or NONE in listed:
            return None
        keys = [self._units[u] for u in listed]
        p = keys[0][0][0]
        if any(row[0] != p or tag != p for row, tag in keys):
            return None
        return self.producers[p], [row[1] for row, _ in keys]


def _without_repetition(units: Sequence[int]) -> list[list[int]]:
    """Places of the first occurrences, then of the second, and so on: heads that share rows."""
    out: list[list[int]] = []
    seen: Counter[int] = Counter()
    for place, unit in enumerate(units):
        if seen[unit] == len(out):
            out.append([])
        out[seen[unit]].append(place)
        seen[unit] += 1
    return out


def read_matrix(ref: Ref) -> tuple[ParameterView, Tensor, Tensor] | None:
    """The matrix (out, in) that a view (in, out) lies in, and the view's rows and columns there.

    None where an axis of the parameter counts both, as in a diagonal.
    """
    small = [collapse(c) for c in ref.coords]
    ins, outs = ([d for d, c in enumerate(small) if c.shape[a] > 1] for a in (0, 1))
    if {*ins} & {*outs}:
        return None
    if len(small) == 2:  # of an axis with one place only the other tells
        outs, ins = ([1], [0]) if 1 in outs or 0 in ins else ([0], [1])
    at = tuple(int(c.flatten()[0]) for d, c in enumerate(small) if d not in (*outs, *ins))
    places = []
    for axis, some in ((1, outs), (0, ins)):
        place = torch.zeros(1, dtype=torch.long)
        for d in some:  # several axes are counted as one
            place = place * ref.sizes[d] + small[d].flatten()
        places.append(place.expand(ref.view[axis]))
    view = ParameterView(ref.name, (tuple(outs), tuple(ins)), at, ref.factor)
    return view, places[0], places[1]


class Readers:
    """The events that each output takes part in, for outputs that nothing nonlinear reads."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.of: dict[Row, list[tuple[Reading, bool]]] = {}
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

    def reading(self, p: int) -> list[tuple[Reading, bool]] | None:
        """The events that read all outputs of a producer; None where they differ or are touched."""
        rows = [(p, i) for i in range(len(self.ledger.producers[p].rows))]
        first = self.of.get(rows[0], [])
        alike = all(r not in self.ledger.touched and self.of.get(r, []) == first for r in rows)
        return first if alike else None

    def together(self, rows: tuple[Row, ...]) -> list[tuple[Reading, bool]] | None:
        """The only readers of outputs that are always read together, in one order; else None."""
        events = self.of.get(rows[0], [])
        if any((event.where if second else event.rows) != rows for event, second in events):
            return None
        alike = all(r not in self.ledger.touched and self.of.get(r) == events for r in rows)
        return events if alike else None

    def source(self, rows: tuple[Row, ...]) -> tuple[Producer, list[int]] | None:
        """The layer whose outputs these are; norms and shared layers are no candidates."""
        made, outputs = self.ledger.producers[rows[0][0]], [i for _, i in rows]
        if any(p != rows[0][0] for p, _ in rows) or made.kind not in ("linear", "conv"):
            return None
        if len(set(outputs)) != len(outputs) or self.shared(made, outputs):
            return None
        return made, outputs
