r"""Constants in sums of layers: which of them cancel, or are taken away by those who read the sum.

Add s_p·c to the bias (or table) of each layer p. A sum then holds t = Σ t_terms, a layer t_p = s_p.
Every reader that cannot take a constant away demands t = 0: the whole numbers s that are left over
are symmetries, for any vector c. A layer norm or a softmax demands nothing if c is a multiple of
the vector of ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import lcm

import torch

from ..actions.action import Action, Parameters
from ..actions.scaling import Leg
from ..actions.shifts import CommonShift, Reader, StreamShift
from ..graph.ledger import Event, Ledger
from ..graph.readers import Readers

Solution = dict[str, int]  # s by the name of a bias or table


def streams(ledger: Ledger, params: Parameters) -> Iterator[Action]:
    """The shifts of every group of layers that sums connect."""
    readers = Readers(ledger)
    for members in _components(ledger):
        plain = _solutions(ledger, readers, members, uniform=False)
        for solution in plain:
            yield _shift(ledger, readers, members, solution, uniform=False)
        for solution in _solutions(ledger, readers, members, uniform=True)[len(plain) :]:
            yield _shift(ledger, readers, members, solution, uniform=True)
        yield from _unseen(ledger, readers, members, params)


def _components(ledger: Ledger) -> list[list[int]]:
    """Producers that are connected by sums, in order."""
    root = list(range(len(ledger.producers)))

    def find(p: int) -> int:
        while root[p] != p:
            p = root[p]
        return p

    owner: dict[str, int] = {}
    for p, made in enumerate(ledger.producers):
        for term in made.terms:
            if term is not None:
                root[find(p)] = find(term)
        leg = made.source(range(len(made.rows)))
        if leg is not None:  # a layer that is used twice has one bias
            root[find(p)] = find(owner.setdefault(leg.name, p))
    groups: dict[int, list[int]] = {}
    for p in range(len(root)):
        groups.setdefault(find(p), []).append(p)
    return [g for g in groups.values() if any(ledger.producers[p].terms for p in g)]


def _held(
    ledger: Ledger, members: Sequence[int], names: dict[int, str], s: dict[str, Fraction]
) -> dict[int, Fraction]:
    """t for every member."""
    t: dict[int, Fraction] = {}
    for p in members:
        terms = [t[q] for q in ledger.producers[p].terms if q is not None]
        t[p] = sum(terms, s.get(names.get(p, ""), Fraction(0)))
    return t


def _solutions(
    ledger: Ledger, readers: Readers, members: Sequence[int], *, uniform: bool
) -> list[Solution]:
    """A basis of whole-numbered s; with `uniform`, first that for any c, then what it adds."""
    names = _sources(ledger, members)
    sources = list(dict.fromkeys(names.values()))
    columns = [_held(ledger, members, names, {name: Fraction(1)}) for name in sources]
    strict = [p for p in members if not _lets(ledger, readers, p, uniform=False)]
    basis = _kernel([[c[p] for c in columns] for p in strict], len(sources))
    if uniform:
        loose = [p for p in strict if not _lets(ledger, readers, p, uniform=True)]
        wider = _kernel([[c[p] for c in columns] for p in loose], len(sources))
        basis = _extended(basis, wider)
    return [{n: k for n, k in zip(sources, line, strict=True) if k} for line in basis]


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


def _lets(ledger: Ledger, readers: Readers, p: int, *, uniform: bool) -> bool:
    """Whether all who read a producer can do with a constant more."""
    events = readers.reading(p)
    return events is not None and all(_takes(ledger, e, second, uniform) for e, second in events)


def _takes(ledger: Ledger, event: Event, second: bool, uniform: bool) -> bool:
    if event.kind == "linear":
        reader = ledger.producers[event.where["reader"]]
        return reader.bias is not None and not event.where.get("padded")
    if event.kind == "softmax" or (event.kind == "norm" and event.where.get("inputs")):
        return uniform
    return event.kind in ("sum", "null") or (event.kind == "pair" and second)


def _kernel(rows: list[list[Fraction]], n: int) -> list[list[int]]:
    """Whole-numbered vectors that span the kernel of a matrix (·, n)."""
    matrix, pivots = [list(r) for r in rows], []
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


def _extended(basis: list[list[int]], more: list[list[int]]) -> list[list[int]]:
    """The basis, and those of the other vectors that it does not span."""
    out = list(basis)
    for line in more:
        grown = torch.tensor([*out, line], dtype=torch.float64)
        if int(torch.linalg.matrix_rank(grown)) > len(out):
            out.append(line)
    return out


def _shift(
    ledger: Ledger, readers: Readers, members: Sequence[int], solution: Solution, *, uniform: bool
) -> StreamShift:
    names = _sources(ledger, members)
    producers = {name: ledger.producers[p] for p, name in names.items()}
    sources = {n: made.source(range(len(made.rows))) for n, made in producers.items()}
    legs = [Leg(n, leg.unit, solution[n]) for n, leg in sources.items() if leg and n in solution]
    t = _held(ledger, members, names, {n: Fraction(k) for n, k in solution.items()})
    found = []
    for p in members:
        for event, _ in (readers.reading(p) or []) if t[p] else []:
            if event.kind == "linear":
                made = ledger.producers[event.where["reader"]]
                assert made.bias is not None
                assert made.bias_rows is not None
                at = [event.where["at"][event.rows.index((p, i))] for i in range(len(event.rows))]
                where = (made.bias, made.bias_rows, str(made.weight), made.rows, torch.tensor(at))
                found.append((Reader(*where), int(t[p])))
    width = max(len(ledger.producers[p].rows) for p in members)
    moved = list(dict.fromkeys([*(leg.name for leg in legs), *(r.bias for r, _ in found)]))
    about = f"{'uniform ' if uniform else ''}shift of {moved[0]}"
    about += f" into {', '.join(moved[1:3])}" if moved[1:] else ", which does nothing"
    return StreamShift(width, legs, found, uniform, about)


def _unseen(
    ledger: Ledger, readers: Readers, members: Sequence[int], params: Parameters
) -> Iterator[CommonShift]:
    """Weights of layers that only norms see: what is the same in all outputs does nothing."""
    blind: dict[int, bool] = {}
    for p in reversed(members):
        events = readers.reading(p)
        sums = [q for q in members if p in ledger.producers[q].terms]
        norms = [e for e, _ in events or [] if e.kind == "norm" and e.where.get("inputs")]
        other = [e for e, _ in events or [] if e.kind not in ("norm", "sum")]
        seen = events is None or other or not (norms or sums) or not all(blind[q] for q in sums)
        blind[p] = not seen
        made = ledger.producers[p]
        mine = blind[p] and made.kind == "linear" and made.weight is not None
        if mine and not readers.shared(made, list(range(len(made.rows)))):
            weight = str(made.weight)
            about = f"common shift of {made.about}'s outputs before a norm"
            yield CommonShift(weight, made.rows, None, None, params[weight][0].numel(), about)
