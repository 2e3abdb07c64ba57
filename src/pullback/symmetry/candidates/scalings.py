"""Scalings from the equations that a walk has left unsolved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from ..actions.action import Action
from ..actions.folding import Folding, Norm
from ..actions.scaling import Leg, Scaling
from ..graph.scales import Form
from ..graph.walk import Region, Walk

Units = dict[int, tuple[int, int]]  # atom -> (scaling, unit)


def scalings(walk: Walk, norms: list[Norm]) -> list[Action]:
    """One scaling for each layer whose outputs kept scales of their own."""
    arrays = [(name, r, _whole(r, array)) for name, r, array in _arrays(walk)]
    units = _units(walk, [array for _, _, array in arrays])
    count = 1 + max((s for s, _ in units.values()), default=-1)
    legs: list[list[Leg]] = [[] for _ in range(count)]
    for name, _, array in arrays:
        for scaling, leg in _legs(walk, name, array, units):
            legs[scaling].append(leg)
    sizes = Counter(scaling for scaling, _ in units.values())
    reached = [_reached(walk, fold.labels, units) for fold in walk.folds]
    out: list[Action] = []
    for s, found in enumerate(legs):
        scaling = Scaling(sizes[s], _joined(found), _about(found))
        mine = [norm for norm, those in zip(norms, reached, strict=True) if s in those]
        out.append(Folding(scaling, mine) if mine else scaling)
    return out


def _arrays(walk: Walk) -> Iterator[tuple[str, Region, Tensor]]:
    for name, regions in walk.held.items():
        for region in regions:
            for array in region.legs.values():
                yield name, region, array


def _whole(region: Region, array: Tensor) -> Tensor:
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


def _joined(legs: list[Leg]) -> list[Leg]:
    """Legs of different regions of one parameter as one."""
    out: list[Leg] = []
    for leg in legs:
        for i, other in enumerate(out):
            if (other.name, other.power) == (
                leg.name,
                leg.power,
            ) and other.unit.ndim == leg.unit.ndim:
                try:
                    one, two = torch.broadcast_tensors(other.unit, leg.unit)
                except RuntimeError:
                    continue
                if one.shape in (other.unit.shape, leg.unit.shape) and not bool(
                    ((one >= 0) & (two >= 0)).any()
                ):
                    out[i] = Leg(leg.name, torch.maximum(one, two), leg.power)
                    break
        else:
            out.append(leg)
    return out


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
