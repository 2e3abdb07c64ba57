"""Periodic lattices: which sites are neighbours, and the permutations that keep neighbours."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .._core.errors import require


class Lattice(ABC):
    """Sites 0, ..., n − 1 with periodic edges."""

    #: number of sites
    sites: int

    @abstractmethod
    def bonds(self, order: int = 1) -> Tensor:
        """Return pairs of nearest (order 1) or next-nearest (order 2) neighbours, (bonds, 2)."""

    @abstractmethod
    def sublattice(self) -> Tensor | None:
        """Return 0 or 1 for every site, other ones for neighbours; None if that is impossible."""

    @abstractmethod
    def translations(self) -> Tensor:
        """Return all translations as permutations of the sites, (translations, sites)."""

    @abstractmethod
    def point_group(self) -> Tensor:
        """Return rotations and reflections that fix site 0, as permutations (operations, sites)."""

    def space_group(self) -> Tensor:
        """Return translations after each operation of the point group, (operations, sites)."""
        operations = self.point_group()
        moved = [operations[:, translation] for translation in self.translations()]
        return torch.cat(moved)


class Chain(Lattice):
    """A ring of n sites.

    >>> Chain(4).bonds()
    tensor([[0, 1],
            [1, 2],
            [2, 3],
            [0, 3]])
    """

    def __init__(self, n: int) -> None:
        _require_length("Chain(n)", n, least=3)
        self.sites = self.n = n

    def bonds(self, order: int = 1) -> Tensor:
        _require_order(order)
        return _remove_repeated_pairs([(i, (i + order) % self.n) for i in range(self.n)])

    def sublattice(self) -> Tensor | None:
        if self.n % 2:
            return None
        return torch.arange(self.n) % 2

    def translations(self) -> Tensor:
        site = torch.arange(self.n)
        return torch.stack([(site + shift) % self.n for shift in range(self.n)])

    def point_group(self) -> Tensor:
        site = torch.arange(self.n)
        return torch.stack([site, -site % self.n])

    def __repr__(self) -> str:
        return f"Chain({self.n})"


class Square(Lattice):
    """A torus of n rows and m columns; site i·m + j is in row i and column j."""

    def __init__(self, n: int, m: int | None = None) -> None:
        columns = n if m is None else m
        _require_length("Square(n, m)", n, least=2)
        _require_length("Square(n, m)", columns, least=2)
        self.n = n
        self.m = columns
        self.sites = n * columns

    def _site(self, row: int, column: int) -> int:
        return (row % self.n) * self.m + column % self.m

    def bonds(self, order: int = 1) -> Tensor:
        _require_order(order)
        shifts = [(0, 1), (1, 0)] if order == 1 else [(1, 1), (1, -1)]
        pairs = []
        for down, right in shifts:
            for site in range(self.sites):
                row, column = divmod(site, self.m)
                pairs.append((site, self._site(row + down, column + right)))
        return _remove_repeated_pairs(pairs)

    def sublattice(self) -> Tensor | None:
        if self.n % 2 or self.m % 2:
            return None
        row, column = self._coordinates()
        return (row + column) % 2

    def _coordinates(self) -> tuple[Tensor, Tensor]:
        """Return the rows and the columns of all sites."""
        site = torch.arange(self.sites)
        return site // self.m, site % self.m

    def translations(self) -> Tensor:
        row, column = self._coordinates()
        permutations = []
        for down in range(self.n):
            for right in range(self.m):
                moved = (row + down) % self.n * self.m + (column + right) % self.m
                permutations.append(moved)
        return torch.stack(permutations)

    def point_group(self) -> Tensor:
        """Return eight operations of a square, four of a rectangle."""
        row, column = self._coordinates()
        permutations = []
        for row_sign in (1, -1):
            for column_sign in (1, -1):
                mirrored_row = row_sign * row % self.n
                mirrored_column = column_sign * column % self.m
                permutations.append(mirrored_row * self.m + mirrored_column)
                if self.n == self.m:
                    permutations.append(mirrored_column * self.m + mirrored_row)
        return torch.stack(permutations)

    def __repr__(self) -> str:
        return f"Square({self.n}, {self.m})"


def _remove_repeated_pairs(pairs: list[tuple[int, int]]) -> Tensor:
    """Return the pairs, smaller site first, in the order they are met, without repetitions.

    On a torus of width two both edges of a site lead to the same neighbour: that bond counts once.
    """
    ordered = dict.fromkeys((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1])
    return torch.tensor(list(ordered))


def _require_length(name: str, length: object, least: int) -> None:
    usable = isinstance(length, int) and not isinstance(length, bool) and length >= least
    require(usable, name, length, f"Use an integer ≥ {least}")


def _require_order(order: object) -> None:
    require(order in (1, 2), "The order of neighbours", order, "Use 1 or 2")
