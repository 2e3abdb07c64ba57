"""Scalings from the equations that a walk has left unsolved, and invertible matrices between layers
with nothing nonlinear between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from ..actions.charts import ChartAction
from ..actions.scaling import Action, Leg, Mixing, Scaling, connected
from .ledger import Producer, Readers, Row
from .scales import Form
from .walk import ParameterRegion, Walk

Units = dict[int, tuple[int, int]]  # atom -> (scaling, unit)


def scalings(walk: Walk) -> list[Action]:
    """One scaling for each layer whose outputs kept scales of their own."""
    arrays = [(name, r, _whole(r, array)) for name, r, array in _arrays(walk)]
    units = _units(walk, [array for _, _, array in arrays])
    count = 1 + max((s for s, _ in units.values()), default=-1)
    legs: list[list[Leg]] = [[] for _ in range(count)]
    for name, _, array in arrays:
        for scaling, leg in _legs(walk, name, array, units):
            legs[scaling].append(leg)
    sizes = Counter(scaling for scaling, _ in units.values())
    reached = [(norm, _reached(walk, labels, units)) for norm, labels in walk.folds]
    out: list[Action] = []
    for s, found in enumerate(legs):
        scaling = Scaling(sizes[s], found, _about(found))
        mine = {norm.shift: norm for norm, those in reached if s in those}
        # x ← αx, g ← g/α leaves g x/σ alone, and the norm's constant stays if β changes with g
        out.append(ChartAction(scaling, mine) if mine else scaling)
    return out


def _arrays(walk: Walk) -> Iterator[tuple[str, ParameterRegion, Tensor]]:
    for name, regions in walk.held.items():
        for region in regions:
            for array in region.legs.values():
                yield name, region, array


def _whole(region: ParameterRegion, array: Tensor) -> Tensor:
    """Labels on the parameter that are −1 outside the region."""
    if bool(region.mask.all()) or array.ndim == 0:
        return array
    mask = region.mask.view(-1, *[1] * (array.ndim - 1))
    return torch.where(mask, array, -1)


def _units(walk: Walk, arrays: list[Tensor]) -> Units:
    """Atoms that some parameter is scaled by, counted by the call that made them."""
    atoms: dict[int, None] = {}
    for array in arrays:
        for label in array.unique().tolist():
            if label > 0:
                atoms.update(
                    dict.fromkeys(a for a, _ in walk.scales.solved(walk.scales.forms[label]))
                )
    number: dict[int, int] = {}
    sizes: dict[int, int] = {}
    units: Units = {}
    for atom in sorted(atoms):
        scaling = number.setdefault(walk.scales.origin[atom], len(number))
        units[atom] = (scaling, sizes.setdefault(scaling, 0))
        sizes[scaling] += 1
    return units


def _legs(walk: Walk, name: str, array: Tensor, units: Units) -> Iterator[tuple[int, Leg]]:
    """The legs of a parameter: one for each scaling, power and place in the forms."""
    labels, place = array.unique(return_inverse=True)
    forms: list[Form] = [
        walk.scales.solved(walk.scales.forms[x]) if x > 0 else () for x in labels.tolist()
    ]
    tables: dict[tuple[int, int, int], Tensor] = {}
    for k, form in enumerate(forms):
        seen: dict[tuple[int, int], int] = {}
        for atom, power in form:
            scaling, unit = units[atom]
            slot = seen.get((scaling, power), 0)
            seen[scaling, power] = slot + 1
            table = tables.setdefault((scaling, power, slot), torch.full((len(forms),), -1))
            table[k] = unit
    for (scaling, power, _), table in tables.items():
        yield scaling, Leg(name, table[place].view(array.shape), power)


def _reached(walk: Walk, labels: Tensor, units: Units) -> set[int]:
    """The scalings that the entries with these labels answer to."""
    forms = [walk.scales.solved(walk.scales.forms[x]) for x in labels.unique().tolist() if x > 0]
    return {units[a][0] for form in forms for a, _ in form if a in units}


def _about(legs: list[Leg]) -> str:
    """Who is scaled, in words."""
    into = list(dict.fromkeys(_module(leg.name) for leg in legs if leg.power > 0))
    out = list(dict.fromkeys(_module(leg.name) for leg in legs if leg.power < 0))
    return f"scaling of {_listed(into)}" + (f" against {_listed(out)}" if out else "")


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


Rows = tuple[Row, ...]


def mixings(walk: Walk, readers: Readers) -> list[Mixing]:
    """One for each set of outputs that only linear layers read, or only products of two layers."""
    ledger, done = readers.ledger, set[Rows]()
    found: list[tuple[Mixing | None, list[Rows]]] = []
    for event in ledger.events:
        if event.kind == "linear" and event.rows not in done and len(event.rows) > 1:
            members = _class(readers, event.rows)
            done.update(members or [event.rows])
            if members is not None:
                found.append((_between(readers, members), members))
    pairs = [e for e in ledger.events if e.kind == "pair" and len(e.rows) > 1]
    for part in connected([(0, e.rows), (1, e.where)] for e in pairs):
        queries = list(dict.fromkeys(pairs[i].rows for i in part))
        keys = list(dict.fromkeys(pairs[i].where for i in part))
        found.append((_against(readers, queries, keys), [*queries, *keys]))
    for mixing, members in found:
        for p, i in (row for rows in members for row in rows if mixing is not None):
            # the scales of outputs that are mixed are part of the mixing
            walk.scales.fix(ledger.producers[p].atoms[i])
    return [mixing for mixing, _ in found if mixing is not None]


def _class(readers: Readers, rows: Rows) -> list[Rows] | None:
    """All outputs that one matrix must mix, since sums connect them."""
    found: dict[Rows, None] = {}
    waiting = [rows]
    while waiting:
        now = waiting.pop()
        if now in found:
            continue
        found[now] = None
        more = _partners(readers, now)
        if more is None:
            return None
        waiting += more
    return list(found)


def _partners(readers: Readers, rows: Rows) -> list[Rows] | None:
    """Outputs that are mixed where these are; None if they cannot be."""
    p, outputs, ledger = rows[0][0], [i for _, i in rows], readers.ledger
    made, events = ledger.producers[p], readers.together(rows)
    if any(q != p for q, _ in rows) or len(set(outputs)) != len(outputs):
        return None
    if events is None or None in made.terms:
        return None
    if made.kind not in ("linear", "conv", "embedding", "sum"):
        return None
    if any(e.kind not in ("linear", "sum") for e, _ in events):
        return None
    weights = [ledger.producers[e.where["reader"]].weight for e, _ in events if e.kind == "linear"]
    uses = Counter(other.weight for other in ledger.producers)
    if any(uses[w] > 1 for w in weights) or (made.weight and readers.shared(made, outputs)):
        return None  # one matrix would have to do for several uses
    if not made.terms and not any(e.kind == "sum" for e, _ in events):
        return []
    if outputs != list(range(len(made.rows))):
        return None
    sums = [q for q, other in enumerate(ledger.producers) if p in other.terms]
    ends = [*sums, *(t for t in made.terms if t is not None)]
    return [tuple((q, i) for i in outputs) for q in ends]


def _between(readers: Readers, members: list[Rows]) -> Mixing | None:
    """Outputs of linear layers that only linear layers read."""
    into: dict[tuple[str, tuple[int, ...]], None] = {}
    tables: dict[tuple[str, tuple[int, ...]], None] = {}
    out: dict[tuple[str, tuple[int, ...]], None] = {}
    producers = readers.ledger.producers
    for rows in members:
        made, outputs = producers[rows[0][0]], [i for _, i in rows]
        if made.kind == "embedding":
            tables[str(made.weight), tuple(made.rows[outputs].tolist())] = None
        else:
            into.update(dict.fromkeys((n, tuple(at.tolist())) for n, at in _into(made, outputs)))
        for event, _ in readers.together(rows) or ():
            if event.kind != "sum":
                reader = producers[event.where["reader"]]
                out[str(reader.weight), tuple(event.where["at"])] = None
    places = [(name, i) for name, at in out for i in at]
    if not out or len(set(places)) != len(places):
        return None  # columns that would be mixed twice
    first = next(iter((*into, *tables)))[0]
    names = ", ".join(dict.fromkeys(name for name, _ in out))
    return Mixing(
        len(members[0]),
        [(name, torch.tensor(at)) for name, at in into],
        [(name, torch.tensor(at), False) for name, at in out],
        f"GL({len(members[0])}) between {first} and {names}",
        [(name, torch.tensor(at)) for name, at in tables],
    )


def _into(made: Producer, outputs: list[int]) -> list[tuple[str, Tensor]]:
    into = [] if made.weight is None else [(made.weight, made.rows[outputs])]
    if made.bias is not None and made.bias_rows is not None:
        into.append((made.bias, made.bias_rows[outputs]))
    return into


def _against(readers: Readers, queries: list[Rows], keys: list[Rows]) -> Mixing | None:
    """Queries against keys; several heads may share either."""
    sides: list[list[tuple[str, Tensor]]] = [[], []]
    for k, side in enumerate((queries, keys)):
        for rows in side:
            source, events = readers.source(rows), readers.together(rows)
            if source is None or events is None:
                return None
            if any(e.kind != "pair" or second != bool(k) for e, second in events):
                return None
            sides[k].extend(_into(*source))
    out = [(name, rows, True) for name, rows in sides[1]]
    size = len(queries[0])
    about = f"GL({size}) between query {sides[0][0][0]} and key {sides[1][0][0]}"
    return Mixing(size, sides[0], out, about)
