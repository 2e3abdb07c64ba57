"""Lattices: bonds, sublattices, and permutations that keep bonds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback import vmc


def as_set(bonds: Tensor) -> set[tuple[int, ...]]:
    return {tuple(sorted(pair)) for pair in bonds.tolist()}


@pytest.mark.parametrize(
    ("lattice", "nearest", "next_nearest"),
    [
        (vmc.Chain(6), 6, 6),
        (vmc.Square(4), 32, 32),
        (vmc.Square(4, 6), 48, 48),
        (vmc.Chain(5), 5, 5),
    ],
    ids=repr,
)
def test_every_bond_is_listed_once(lattice: vmc.Lattice, nearest: int, next_nearest: int) -> None:
    for order, count in ((1, nearest), (2, next_nearest)):
        bonds = lattice.bonds(order)
        assert len(bonds) == count
        assert len(as_set(bonds)) == count


@pytest.mark.parametrize("lattice", [vmc.Chain(6), vmc.Square(4), vmc.Square(4, 6)], ids=repr)
def test_symmetries_are_permutations_that_keep_bonds(lattice: vmc.Lattice) -> None:
    group = lattice.space_group()
    assert len(group.unique(dim=0)) == len(group)
    for permutation in group:
        assert torch.equal(permutation.sort().values, torch.arange(lattice.sites))
        for order in (1, 2):
            assert as_set(permutation[lattice.bonds(order)]) == as_set(lattice.bonds(order))


@pytest.mark.parametrize("lattice", [vmc.Chain(6), vmc.Square(4), vmc.Square(2, 4)], ids=repr)
def test_the_group_is_closed(lattice: vmc.Lattice) -> None:
    group = {tuple(p) for p in lattice.space_group().tolist()}
    for one in lattice.space_group():
        for two in lattice.space_group():
            assert tuple(one[two].tolist()) in group


def test_sublattices_alternate_where_lengths_are_even() -> None:
    for lattice in (vmc.Chain(6), vmc.Square(4, 6)):
        sublattice = lattice.sublattice()
        assert sublattice is not None
        bonds = lattice.bonds()
        assert bool((sublattice[bonds[:, 0]] != sublattice[bonds[:, 1]]).all())
    assert vmc.Chain(5).sublattice() is None
    assert vmc.Square(3, 4).sublattice() is None


@pytest.mark.parametrize("length", [0, 2, -3, 2.5, True])
def test_unusable_lengths_are_refused(length: object) -> None:
    with pytest.raises(pb.PullbackError, match="integer"):
        vmc.Chain(length)  # pyright: ignore[reportArgumentType]
