"""Scalings from the equations that a walk has left unsolved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..actions.action import Action
from ..actions.charts import ChartAction, FixedNorm
from ..actions.scaling import Leg, Scaling
from .walk import ParameterRegion, Walk


class _UnitNumber(NamedTuple):
    """The number of a scaling, and of a unit in it."""

    scaling: int
    unit: int


#: the unit that each atom scales
_UnitsByAtom = dict[int, _UnitNumber]


class _LegKey(NamedTuple):
    """Entries of an array that one leg can scale.

    `repetition` counts atoms of one scaling with one power in a form: a leg has one unit per entry.
    """

    scaling: int
    power: int
    repetition: int


class _LabeledArray(NamedTuple):
    """An array of labels on a parameter."""

    name: str
    labels: Tensor


def find_scalings(walk: Walk) -> list[Action]:
    """Return one scaling for each layer whose outputs kept scales of their own."""
    arrays = list(_list_arrays(walk))
    units_by_atom = _number_atoms(walk, [array.labels for array in arrays])
    unit_counts: dict[int, int] = {}
    for number in units_by_atom.values():
        unit_counts[number.scaling] = unit_counts.get(number.scaling, 0) + 1
    legs: dict[int, list[Leg]] = {number: [] for number in sorted(unit_counts)}
    for array in arrays:
        for scaling, leg in _make_legs(walk, array, units_by_atom):
            legs[scaling].append(leg)
    fixed_norms = _find_fixed_norms(walk, units_by_atom)
    actions: list[Action] = []
    for number, scaling_legs in legs.items():
        scaling = Scaling(unit_counts[number], scaling_legs, _describe(scaling_legs))
        norms = fixed_norms.get(number)
        if norms:
            # x ← αx, g ← g/α leaves g x/σ alone, and the norm's constant stays if β follows g.
            actions.append(ChartAction(scaling, norms))
        else:
            actions.append(scaling)
    return actions


def _list_arrays(walk: Walk) -> Iterator[_LabeledArray]:
    for name, regions in walk.regions.items():
        for region in regions:
            for labels in region.legs.values():
                yield _LabeledArray(name, _mask_outside(region, labels))


def _mask_outside(region: ParameterRegion, labels: Tensor) -> Tensor:
    """Return labels on the parameter that are −1 outside the region."""
    if bool(region.mask.all()) or labels.ndim == 0:
        return labels
    mask = region.mask.view(-1, *[1] * (labels.ndim - 1))
    return torch.where(mask, labels, -1)


def _list_atoms(walk: Walk, labels: Tensor) -> list[int]:
    """Return the atoms in the solved forms of some labels, with repetitions."""
    atoms: list[int] = []
    for label in labels.unique().tolist():
        if label > 0:
            atoms.extend(atom for atom, _ in walk.scales.solve_label(label))
    return atoms


def _number_atoms(walk: Walk, arrays: Iterable[Tensor]) -> _UnitsByAtom:
    """Number the atoms that scale parameters; those of one operation are units of one scaling."""
    atoms: set[int] = set()
    for labels in arrays:
        atoms.update(_list_atoms(walk, labels))
    scaling_numbers: dict[int, int] = {}
    unit_counts: dict[int, int] = {}
    units_by_atom: _UnitsByAtom = {}
    for atom in sorted(atoms):
        origin = walk.scales.origin[atom]
        scaling = scaling_numbers.setdefault(origin, len(scaling_numbers))
        unit = unit_counts.get(scaling, 0)
        units_by_atom[atom] = _UnitNumber(scaling, unit)
        unit_counts[scaling] = unit + 1
    return units_by_atom


def _make_legs(
    walk: Walk, array: _LabeledArray, units_by_atom: _UnitsByAtom
) -> Iterator[tuple[int, Leg]]:
    """Yield the legs of an array, each with the number of its scaling."""
    labels, label_index = array.labels.unique(return_inverse=True)
    units_by_key: dict[_LegKey, Tensor] = {}
    for k, label in enumerate(labels.tolist()):
        if label <= 0:
            continue
        repetitions: dict[tuple[int, int], int] = {}
        for atom, power in walk.scales.solve_label(label):
            number = units_by_atom[atom]
            repetition = repetitions.get((number.scaling, power), 0)
            repetitions[number.scaling, power] = repetition + 1
            key = _LegKey(number.scaling, power, repetition)
            if key not in units_by_key:
                units_by_key[key] = torch.full((len(labels),), -1)
            units_by_key[key][k] = number.unit
    for key, units in units_by_key.items():
        unit = units[label_index].view(array.labels.shape)
        yield key.scaling, Leg(array.name, unit, key.power)


def _find_fixed_norms(walk: Walk, units_by_atom: _UnitsByAtom) -> dict[int, dict[str, FixedNorm]]:
    """Return the batch norms whose inputs a scaling scales, by scaling and name of the shift."""
    norms: dict[int, dict[str, FixedNorm]] = {}
    for use in walk.fixed_norms:
        for atom in _list_atoms(walk, use.labels):
            if atom in units_by_atom:
                scaling = units_by_atom[atom].scaling
                norms.setdefault(scaling, {})[use.norm.shift] = use.norm
    return norms


def _describe(legs: list[Leg]) -> str:
    """Return which modules are scaled, in words."""
    multiplied = list(dict.fromkeys(_owner(leg.name) for leg in legs if leg.power > 0))
    divided = list(dict.fromkeys(_owner(leg.name) for leg in legs if leg.power < 0))
    description = f"scaling of {_enumerate_names(multiplied)}"
    if divided:
        description += f" against {_enumerate_names(divided)}"
    return description


def _owner(parameter_name: str) -> str:
    """Return the module that holds a parameter, or the parameter if it is the model's own."""
    return parameter_name.rpartition(".")[0] or parameter_name


def _enumerate_names(names: list[str]) -> str:
    """Return at most three names in words."""
    text = ", ".join(names[:3])
    if len(names) > 3:
        text += f" and {len(names) - 3} more"
    return text
