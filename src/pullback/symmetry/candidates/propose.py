"""Mixings and shifts from who reads the outputs of linear layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..actions.action import Action, Parameters
from ..actions.folding import FoldedShift, Norm
from ..actions.mixing import Mixing
from ..actions.shifts import BiasShift, CommonShift, MeanShift, Reader
from ..graph.ledger import Event, Ledger, Producer, Row
from ..graph.readers import Readers
from ..graph.walk import Walk


def mixings(walk: Walk) -> list[Mixing]:
    """Invertible matrices between layers with nothing nonlinear between them."""
    readers = Readers(walk.ledger)
    out: list[Mixing] = []
    done: set[tuple[Row, ...]] = set()
    for event in walk.ledger.events:
        if event.rows in done or len(event.rows) < 2:
            continue
        if event.kind == "linear":
            found = _between(walk.ledger, readers, event.rows)
        elif event.kind == "pair":
            found = _against(walk.ledger, readers, event, done)
        else:
            continue
        done.add(event.rows)
        if found is not None:
            out.append(found)
            _give(walk, event)
    return out


def _give(walk: Walk, event: Event) -> None:
    """The scales of outputs that are mixed are part of the mixing."""
    rows = (*event.rows, *event.where) if event.kind == "pair" else event.rows
    for p, i in rows:
        walk.scales.fix(walk.ledger.producers[p].atoms[i])


def _source(readers: Readers, rows: tuple[Row, ...]) -> tuple[Producer, list[int]] | None:
    """The layer whose outputs these are; norms and shared layers are no candidates."""
    made = readers.ledger.producers[rows[0][0]]
    if any(p != rows[0][0] for p, _ in rows) or made.kind not in ("linear", "conv"):
        return None
    outputs = [i for _, i in rows]
    if len(set(outputs)) != len(outputs) or readers.shared(made, outputs):
        return None
    return made, outputs


def _into(made: Producer, outputs: list[int]) -> list[tuple[str, Tensor]]:
    into = [(str(made.weight), made.rows[outputs])]
    if made.bias is not None and made.bias_rows is not None:
        into.append((made.bias, made.bias_rows[outputs]))
    return into


def _between(ledger: Ledger, readers: Readers, rows: tuple[Row, ...]) -> Mixing | None:
    """Outputs of one linear layer that only linear layers read."""
    source, events = _source(readers, rows), readers.together(rows)
    if source is None or events is None or not readers.clean(rows):
        return None
    if any(e.kind != "linear" for e, _ in events):
        return None
    out = []
    for event, _ in events:
        reader = ledger.producers[event.where["reader"]]
        if reader.weight == source[0].weight:
            return None  # a layer that reads itself
        out.append((str(reader.weight), torch.tensor(event.where["at"]), False))
    names = ", ".join(dict.fromkeys(n for n, _, _ in out))
    about = f"GL({len(rows)}) between {source[0].weight} and {names}"
    return Mixing(len(rows), _into(*source), out, about)


def _against(
    ledger: Ledger, readers: Readers, event: Event, done: set[tuple[Row, ...]]
) -> Mixing | None:
    """Queries against keys; several heads may share either."""
    lefts, rights = {event.rows: None}, {event.where: None}
    for _ in range(len(ledger.events)):
        before = len(lefts) + len(rights)
        for other in ledger.events:
            if other.kind == "pair" and (other.rows in lefts or other.where in rights):
                lefts[other.rows] = rights[other.where] = None
        if len(lefts) + len(rights) == before:
            break
    done.update(lefts)
    sides: list[list[tuple[str, Tensor]]] = [[], []]
    for k, side in enumerate((lefts, rights)):
        for rows in side:
            source, events = _source(readers, rows), readers.together(rows)
            if source is None or events is None or not readers.clean(rows):
                return None
            if any(e.kind != "pair" or second != bool(k) for e, second in events):
                return None
            sides[k].extend(_into(*source))
    out = [(name, rows, True) for name, rows in sides[1]]
    about = f"GL({len(event.rows)}) between query {sides[0][0][0]} and key {sides[1][0][0]}"
    return Mixing(len(event.rows), sides[0], out, about)


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
    source, events = _source(readers, event.rows), readers.together(event.rows)
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
