"""Shifts: constants that are added to parameters and taken away by who reads the outputs.

In sums of layers, add s_p·c to the bias (or table) of each layer p. A sum then holds t = Σ t_terms,
a layer t_p = s_p. Every reader that cannot take a constant away demands t = 0: the whole numbers s
that are left over are symmetries, for any vector c. A layer norm or a softmax demands nothing if c
is a multiple of the vector of ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm

import torch
from torch import Tensor

from ..actions.scaling import Action, Leg, Parameters, connected
from ..actions.shifts import Reader, Shift, bias_shift, common_shift, folded_shift, mean_shift
from .ledger import Ledger, Producer, Readers, Reading, Row
from .walk import Walk


def shifts(walk: Walk, readers: Readers, params: Parameters) -> Iterator[Action]:
    """Biases that other biases can take over, or that do nothing."""
    ledger = readers.ledger
    for p, made in enumerate(ledger.producers):
        rows = [(p, i) for i in range(len(made.rows))]
        rows = [r for r in rows if r not in ledger.touched and r in readers.of]
        rows = [r for r in rows if made.weight is None or not readers.shared(made, [r[1]])]
        groups: dict[object, list[Row]] = {}
        for row in rows:
            groups.setdefault(_reading(readers.of[row]), []).append(row)
        for group in groups.values():
            yield from _moved_bias(walk, made, group, readers)
    for event in ledger.events:
        if event.kind in ("norm", "softmax"):
            yield from _common(readers, event, params)
        elif event.kind == "linear":
            yield from _mean(ledger, event)


def _reading(events: list[tuple[Reading, bool]]) -> object:
    """Who reads an output, without where."""
    keys = []
    for event, second in events:
        more = {} if event.kind == "pair" else event.where
        keys.append((event.kind, second, more.get("reader"), more.get("fold"), more.get("padded")))
    # heads that share a key read it in several products
    return tuple(sorted(set(keys), key=str)), any(
        keys.count(k) > 1 and k[0] != "pair" for k in keys
    )


def _moved_bias(walk: Walk, made: Producer, rows: list[Row], readers: Readers) -> Iterator[Action]:
    """What the biases of outputs with the same readers can do."""
    source = made.source([i for _, i in rows])
    if source is None:
        return
    name, n = source.name, len(rows)
    events = readers.of[rows[0]]
    kinds = {(e.kind, second) for e, second in events}
    if kinds == {("pair", True)}:
        yield bias_shift(n, [source], about=f"key bias {name}, which does nothing")
    elif kinds == {("null", False)}:
        yield bias_shift(n, [source], about=f"bias {name} before a batch norm, which does nothing")
    elif kinds == {("fold", False)} and len(events) == 1:
        norm, _ = walk.folds[events[0][0].where["fold"]]
        at = torch.tensor([_place(readers.of[r][0][0], r) for r in rows])
        yield folded_shift(source, n, norm, at, f"bias {name} into {norm.shift}")
    elif kinds == {("linear", False)}:
        found = []
        for k, (event, _) in enumerate(events):
            reader = walk.ledger.producers[event.where["reader"]]
            if reader.bias is None or event.where.get("padded"):
                return
            at = torch.tensor([_place(readers.of[r][k][0], r) for r in rows])
            found.append((_reader(reader, at), 1))
        into = ", ".join(dict.fromkeys(r.bias for r, _ in found))
        yield bias_shift(n, [source], found, about=f"shift of {name} into {into}")


def _reader(made: Producer, columns: Tensor) -> Reader:
    """A linear layer as one that reads constants at these columns."""
    places = columns[:0] if made.bias_rows is None else made.bias_rows
    return Reader(str(made.bias), places, str(made.weight), made.rows, columns)


def _place(event: Reading, row: Row) -> int:
    """Where an event reads an output."""
    return event.where["at"][event.rows.index(row)]


def _common(readers: Readers, event: Reading, params: Parameters) -> Iterator[Action]:
    """A shift of all of a layer's outputs that a norm or a softmax takes away."""
    source, events = readers.source(event.rows), readers.together(event.rows)
    if source is None or events is None or len(events) != 1:
        return
    made, outputs = source
    inputs = event.kind == "softmax" or event.where.get("inputs", False)
    bias = None
    if made.bias is not None and made.bias_rows is not None:
        bias = made.bias, made.bias_rows[outputs]
    if not inputs and bias is None:
        return
    width = (params[str(made.weight)][0].numel() if inputs else 0) + (bias is not None)
    what = "softmax" if event.kind == "softmax" else "norm"
    about = f"common shift of {made.about}'s outputs before a {what}"
    weight = (str(made.weight), made.rows[outputs]) if inputs else None
    yield common_shift(weight, bias, width, about)


def _mean(ledger: Ledger, event: Reading) -> Iterator[Action]:
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
    yield mean_shift(_reader(reader, columns), norm.weight, norm.bias, about)


Solution = dict[str, int]  # s by the name of a bias or table


def streams(readers: Readers, params: Parameters) -> Iterator[Action]:
    """The shifts of every group of layers that sums connect."""
    for members in _components(readers.ledger):
        for solution, uniform in _solutions(readers, members):
            yield _shift(readers, members, solution, uniform)
        yield from _unseen(readers, members, params)


def _components(ledger: Ledger) -> list[list[int]]:
    """Producers that are connected by sums, in order; a layer that is used twice has one bias."""
    keys = []
    for p, made in enumerate(ledger.producers):
        leg = made.source(range(len(made.rows)))
        keys.append([p, *(t for t in made.terms if t is not None), *([leg.name] if leg else [])])
    return [g for g in connected(keys) if any(ledger.producers[p].terms for p in g)]


def _held(
    ledger: Ledger, members: Sequence[int], names: dict[int, str], s: Solution
) -> dict[int, int]:
    """t for every member."""
    t: dict[int, int] = {}
    for p in members:
        terms = [t[q] for q in ledger.producers[p].terms if q is not None]
        t[p] = sum(terms, s.get(names.get(p, ""), 0))
    return t


def _solutions(readers: Readers, members: Sequence[int]) -> list[tuple[Solution, bool]]:
    """A basis of whole-numbered s, and which of them are for multiples of the ones only."""
    ledger = readers.ledger
    names = _sources(ledger, members)
    sources = list(dict.fromkeys(names.values()))
    columns = [_held(ledger, members, names, {name: 1}) for name in sources]
    strict, loose = (
        [p for p in members if not _absorbed(readers, p, uniform=uniform)]
        for uniform in (False, True)
    )
    out = basis = _kernel([[c[p] for c in columns] for p in strict], len(sources))
    for line in _kernel([[c[p] for c in columns] for p in loose], len(sources)):
        grown = torch.tensor([*out, line], dtype=torch.float64)
        if int(torch.linalg.matrix_rank(grown)) > len(out):
            out = [*out, line]
    lines = [{n: k for n, k in zip(sources, line, strict=True) if k} for line in out]
    return [(line, i >= len(basis)) for i, line in enumerate(lines)]


def _sources(ledger: Ledger, members: Sequence[int]) -> dict[int, str]:
    """The bias or table of each member that has one of full width, which nothing else reads."""
    weights = {m.weight for m in ledger.producers if m.table is None}
    legs = {p: ledger.producers[p].source(range(len(ledger.producers[p].rows))) for p in members}
    found = {p: leg for p, leg in legs.items() if leg is not None and leg.name not in weights}
    first = {leg.name: leg for leg in reversed(found.values())}
    width = max(len(ledger.producers[p].rows) for p in members)
    odd = {
        leg.name
        for p, leg in found.items()
        if len(ledger.producers[p].rows) != width or not torch.equal(leg.unit, first[leg.name].unit)
    }
    return {p: leg.name for p, leg in found.items() if leg.name not in odd}


def _absorbed(readers: Readers, p: int, *, uniform: bool) -> bool:
    """Whether every reader of a producer can absorb an added constant."""
    events = readers.reading(p)
    return events is not None and all(
        _absorbs(readers.ledger, e, second, uniform) for e, second in events
    )


def _absorbs(ledger: Ledger, event: Reading, second: bool, uniform: bool) -> bool:
    if event.kind == "linear":
        reader = ledger.producers[event.where["reader"]]
        return reader.bias is not None and not event.where.get("padded")
    if event.kind == "softmax" or (event.kind == "norm" and event.where.get("inputs")):
        return uniform
    return event.kind in ("sum", "null") or (event.kind == "pair" and second)


def _kernel(rows: list[list[int]], n: int) -> list[list[int]]:
    """Whole-numbered vectors that span the kernel of a matrix (·, n)."""
    matrix, pivots = [[Fraction(x) for x in row] for row in rows], []
    for column in range(n):
        at = len(pivots)
        found = next((i for i in range(at, len(matrix)) if matrix[i][column]), None)
        if found is None:
            continue
        matrix[at], matrix[found] = matrix[found], matrix[at]
        matrix[at] = [x / matrix[at][column] for x in matrix[at]]
        for i, row in enumerate(matrix):
            if i != at and row[column]:
                matrix[i] = [x - row[column] * y for x, y in zip(row, matrix[at], strict=True)]
        pivots.append(column)
    out = []
    for free in (c for c in range(n) if c not in pivots):
        line = [Fraction(int(c == free)) for c in range(n)]
        for i, column in enumerate(pivots):
            line[column] = -matrix[i][free]
        scale = lcm(*(x.denominator for x in line))
        out.append([int(x * scale) for x in line])
    return out


def _shift(readers: Readers, members: Sequence[int], solution: Solution, uniform: bool) -> Shift:
    ledger = readers.ledger
    names = _sources(ledger, members)
    producers = {name: ledger.producers[p] for p, name in names.items()}
    sources = {n: made.source(range(len(made.rows))) for n, made in producers.items()}
    legs = [Leg(n, leg.unit, solution[n]) for n, leg in sources.items() if leg and n in solution]
    t = _held(ledger, members, names, solution)
    found = []
    for p in members:
        for event, _ in (readers.reading(p) or []) if t[p] else []:
            if event.kind == "linear":
                made = ledger.producers[event.where["reader"]]
                at = torch.tensor([_place(event, (p, i)) for i in range(len(event.rows))])
                found.append((_reader(made, at), t[p]))
    width = max(len(ledger.producers[p].rows) for p in members)
    moved = list(dict.fromkeys([*(leg.name for leg in legs), *(r.bias for r, _ in found)]))
    about = f"{'uniform ' if uniform else ''}shift of {moved[0]}"
    about += f" into {', '.join(moved[1:3])}" if moved[1:] else ", which does nothing"
    return bias_shift(width, legs, found, uniform, about)


def _unseen(readers: Readers, members: Sequence[int], params: Parameters) -> Iterator[Shift]:
    """Yield common shifts of the weights of layers that only norms read."""
    blind: dict[int, bool] = {}
    for p in reversed(members):
        events = readers.reading(p)
        sums = [q for q in members if p in readers.ledger.producers[q].terms]
        norms = [e for e, _ in events or [] if e.kind == "norm" and e.where.get("inputs")]
        other = [e for e, _ in events or [] if e.kind not in ("norm", "sum")]
        seen = events is None or other or not (norms or sums) or not all(blind[q] for q in sums)
        blind[p] = not seen
        made = readers.ledger.producers[p]
        mine = blind[p] and made.kind == "linear" and made.weight is not None
        if mine and not readers.shared(made, list(range(len(made.rows)))):
            weight = str(made.weight)
            about = f"common shift of {made.about}'s outputs before a norm"
            yield common_shift((weight, made.rows), None, params[weight][0].numel(), about)
