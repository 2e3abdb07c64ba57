"""Shifts from who reads the outputs of linear layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..actions.action import Action, Parameters
from ..actions.folding import FoldedShift, Norm
from ..actions.shifts import BiasShift, CommonShift, MeanShift, Reader
from ..graph.ledger import Event, Ledger, Producer, Row
from ..graph.readers import Readers, source_of
from ..graph.walk import Walk


def shifts(walk: Walk, params: Parameters, norms: list[Norm]) -> Iterator[Action]:
    """Biases that other biases can take over, or that do nothing."""
    readers, ledger = Readers(walk.ledger), walk.ledger
    for p, made in enumerate(ledger.producers):
        rows = [(p, i) for i in range(len(made.rows))]
        rows = [r for r in rows if r not in ledger.touched and r in readers.of]
        rows = [r for r in rows if made.weight is None or not readers.shared(made, [r[1]])]
        groups: dict[object, list[Row]] = {}
        for row in rows:
            groups.setdefault(_reading(readers.of[row]), []).append(row)
        for group in groups.values():
            yield from _moved_bias(ledger, made, group, readers, norms)
    for event in ledger.events:
        if event.kind in ("norm", "softmax"):
            yield from _common(ledger, readers, event, params)
        elif event.kind == "linear":
            yield from _mean(ledger, event)


def _reading(events: list[tuple[Event, bool]]) -> object:
    """Who reads an output, without where."""
    keys = []
    for event, second in events:
        more = {} if event.kind == "pair" else event.where
        keys.append((event.kind, second, more.get("reader"), more.get("fold"), more.get("padded")))
    # heads that share a key read it in several products
    return tuple(sorted(set(keys), key=str)), any(
        keys.count(k) > 1 and k[0] != "pair" for k in keys
    )


def _moved_bias(
    ledger: Ledger, made: Producer, rows: list[Row], readers: Readers, norms: list[Norm]
) -> Iterator[Action]:
    """What the biases of outputs with the same readers can do."""
    source = made.source([i for _, i in rows])
    if source is None:
        return
    name, n = source.name, len(rows)
    events = readers.of[rows[0]]
    kinds = {(e.kind, second) for e, second in events}
    if kinds == {("pair", True)}:
        yield BiasShift(n, source, (), f"key bias {name}, which does nothing")
    elif kinds == {("null", False)}:
        yield BiasShift(n, source, (), f"bias {name} before a batch norm, which does nothing")
    elif kinds == {("fold", False)} and len(events) == 1:
        norm = norms[events[0][0].where["fold"]]
        at = torch.tensor([_place(readers.of[r][0][0], r) for r in rows])
        yield FoldedShift(n, source, norm, at, f"bias {name} into {norm.shift}")
    elif kinds == {("linear", False)}:
        found = []
        for k, (event, _) in enumerate(events):
            reader = ledger.producers[event.where["reader"]]
            if reader.bias is None or reader.bias_rows is None or event.where.get("padded"):
                return
            at = torch.tensor([_place(readers.of[r][k][0], r) for r in rows])
            weight = str(reader.weight)
            found.append(Reader(reader.bias, reader.bias_rows, weight, reader.rows, at))
        into = ", ".join(dict.fromkeys(r.bias for r in found))
        yield BiasShift(n, source, found, f"shift of {name} into {into}")


def _place(event: Event, row: Row) -> int:
    """Where an event reads an output."""
    return event.where["at"][event.rows.index(row)]


def _common(ledger: Ledger, readers: Readers, event: Event, params: Parameters) -> Iterator[Action]:
    """A shift of all of a layer's outputs that a norm or a softmax takes away."""
    source, events = source_of(readers, event.rows), readers.together(event.rows)
    if source is None or events is None or len(events) != 1 or not readers.clean(event.rows):
        return
    made, outputs = source
    inputs = event.kind == "softmax" or event.where.get("inputs", False)
    bias = made.bias if made.bias_rows is not None else None
    places = None if made.bias_rows is None else made.bias_rows[outputs]
    if not inputs and bias is None:
        return
    width = (params[str(made.weight)][0].numel() if inputs else 0) + (bias is not None)
    what = "softmax" if event.kind == "softmax" else "norm"
    about = f"common shift of {made.about}'s outputs before a {what}"
    weight = str(made.weight) if inputs else None
    yield CommonShift(weight, made.rows[outputs], bias, places, width, about)


def _mean(ledger: Ledger, event: Event) -> Iterator[Action]:
    """The direction in which a layer norm's outputs do not vary."""
    norm = ledger.producers[event.rows[0][0]]
    reader = ledger.producers[event.where["reader"]]
    outputs = [i for _, i in event.rows]
    whole = sorted(outputs) == list(range(len(norm.rows)))
    if norm.kind != "layer_norm" or not whole or reader.kind != "linear":
        return
    if any(p != event.rows[0][0] for p, _ in event.rows):
        return
    if norm.bias is not None and reader.bias is None:
        return
    columns = torch.tensor(event.where["at"])[torch.tensor(outputs).argsort()]
    about = f"mean direction of {norm.about or 'a layer norm'} in {reader.about}"
    yield MeanShift(
        str(reader.weight),
        reader.rows,
        columns,
        reader.bias,
        reader.bias_rows,
        norm.weight,
        norm.bias,
        about,
    )
