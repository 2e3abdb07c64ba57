"""Invertible matrices between layers with nothing nonlinear between them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..actions.mixing import Mixing
from ..graph.ledger import Event, Ledger, Producer, Row
from ..graph.readers import Readers, source_of
from ..graph.walk import Walk

Rows = tuple[Row, ...]

#: events in which outputs are read linearly, along an axis of a weight
READ = ("linear", "lines", "bilinear")


def mixings(walk: Walk) -> list[Mixing]:
    """One for each set of outputs that only linear layers read."""
    readers = Readers(walk.ledger)
    out: list[Mixing] = []
    done: set[Rows] = set()
    for event in walk.ledger.events:
        if event.rows in done or len(event.rows) < 2:
            continue
        if event.kind in READ:
            members = _class(walk.ledger, readers, event.rows)
            found = None if members is None else _between(walk.ledger, readers, members)
        elif event.kind == "pair":
            members = [event.rows, event.where]
            found = _against(walk.ledger, readers, event, done)
        else:
            continue
        done.update(members or [event.rows])
        if found is not None:
            out.append(found)
            for p, i in (row for rows in members or () for row in rows):
                # the scales of outputs that are mixed are part of the mixing
                walk.scales.fix(walk.ledger.producers[p].atoms[i])
    return out


def _class(ledger: Ledger, readers: Readers, rows: Rows) -> list[Rows] | None:
    """All outputs that one matrix must mix: a layer's that is used again, and those of sums."""
    found: dict[Rows, None] = {}
    waiting = [rows]
    while waiting:
        now = waiting.pop()
        if now in found:
            continue
        found[now] = None
        more = _partners(ledger, readers, now)
        if more is None:
            return None
        waiting += more
    return list(found)


def _partners(ledger: Ledger, readers: Readers, rows: Rows) -> list[Rows] | None:
    """Outputs that are mixed where these are; None if they cannot be."""
    p, outputs = rows[0][0], [i for _, i in rows]
    made, events = ledger.producers[p], readers.together(rows)
    if any(q != p for q, _ in rows) or len(set(outputs)) != len(outputs):
        return None
    if events is None or not readers.clean(rows) or None in made.terms:
        return None
    if made.kind not in ("linear", "conv", "bilinear", "embedding", "bag", "sum"):
        return None
    more: list[Rows] = []
    whole = outputs == list(range(len(made.rows)))
    if any(e.kind not in (*READ, "sum") for e, _ in events):
        return None
    if made.terms or any(e.kind == "sum" for e, _ in events):
        if not whole:
            return None
        sums = [q for q, other in enumerate(ledger.producers) if p in other.terms]
        ends = [*sums, *(t for t in made.terms if t is not None)]
        more += [tuple((q, i) for i in outputs) for q in ends]
    again = [] if made.weight is None else _again(ledger, made, outputs)
    others = [_beside(ledger, event) for event, _ in events if event.kind != "sum"]
    if again is None or None in others:
        return None
    return [*more, *again, *(rows for found in others for rows in found or ())]


def _again(ledger: Ledger, made: Producer, outputs: list[int]) -> list[Rows] | None:
    """The same rows of a weight wherever it is used; None where only some of them are."""
    wanted = made.rows[outputs].tolist()
    out: list[Rows] = []
    for q, other in enumerate(ledger.producers):
        if other.weight != made.weight:
            continue
        place = {int(r): i for i, r in enumerate(other.rows)}
        common = [place[r] for r in wanted if r in place]
        if not common:
            continue
        if len(common) != len(wanted) or other.kind != made.kind:
            return None
        out.append(tuple((q, i) for i in common))
    return out


def _beside(ledger: Ledger, event: Event) -> list[Rows] | None:
    """What the same columns of a weight read wherever it is used; None if no layer's outputs."""
    reader, where = ledger.producers[event.where["reader"]], event.where
    key = where["at"], where.get("axis", 1)
    out: list[Rows] = []
    for q, other in enumerate(ledger.producers):
        if other.weight != reader.weight or q in ledger.blank:
            continue
        mine = [e for e in ledger.events if e.kind in READ and e.where["reader"] == q]
        found = [e.rows for e in mine if (e.where["at"], e.where.get("axis", 1)) == key]
        if not found:
            return None
        out += found
    return out


def _between(ledger: Ledger, readers: Readers, members: list[Rows]) -> Mixing | None:
    """Outputs of linear layers that only linear layers read."""
    into: dict[tuple[str, tuple[int, ...]], None] = {}
    tables: dict[tuple[str, tuple[int, ...]], None] = {}
    out: dict[tuple[str, tuple[int, ...], int], None] = {}
    for rows in members:
        made, outputs = ledger.producers[rows[0][0]], [i for _, i in rows]
        if made.kind in ("embedding", "bag"):
            tables[str(made.weight), tuple(made.rows[outputs].tolist())] = None
        else:
            into.update(dict.fromkeys((n, tuple(at.tolist())) for n, at in _into(made, outputs)))
        for event, _ in readers.together(rows) or ():
            if event.kind != "sum":
                reader = ledger.producers[event.where["reader"]]
                axis = event.where.get("axis", 1)
                out[str(reader.weight), tuple(event.where["at"]), axis] = None
    places = [(name, axis, i) for name, at, axis in out for i in at]
    if not out or len(set(places)) != len(places):
        return None  # columns that would be mixed twice
    first = next(iter((*into, *tables)))[0]
    names = ", ".join(dict.fromkeys(name for name, _, _ in out))
    return Mixing(
        len(members[0]),
        [(name, torch.tensor(at)) for name, at in into],
        [(name, torch.tensor(at), False) for name, at, axis in out if axis == 1],
        f"GL({len(members[0])}) between {first} and {names}",
        [(name, torch.tensor(at)) for name, at in tables],
        [(name, torch.tensor(at), axis) for name, at, axis in out if axis != 1],
    )


def _into(made: Producer, outputs: list[int]) -> list[tuple[str, Tensor]]:
    into = [] if made.weight is None else [(made.weight, made.rows[outputs])]
    if made.bias is not None and made.bias_rows is not None:
        into.append((made.bias, made.bias_rows[outputs]))
    return into


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
            source, events = source_of(readers, rows), readers.together(rows)
            if source is None or events is None or not readers.clean(rows):
                return None
            if any(e.kind != "pair" or second != bool(k) for e, second in events):
                return None
            sides[k].extend(_into(*source))
    out = [(name, rows, True) for name, rows in sides[1]]
    about = f"GL({len(event.rows)}) between query {sides[0][0][0]} and key {sides[1][0][0]}"
    return Mixing(len(event.rows), sides[0], out, about)
