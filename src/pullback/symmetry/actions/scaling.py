r"""Group actions on parameters that leave a network's function as it is: scalings and mixings.

Each acts on a dict of parameters by name and returns the changed ones, never touching its
argument. `generators` are the tangents of its orbits, Z = d/dt (exp(t·e_i)·w) at t = 0, one per
dimension of the group: vectors in the kernel of J.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]


class Action(ABC):
    """A group that acts on some of a network's parameters."""

    #: what it is, for people
    about: str
    #: whether it looks at parameters that it does not move
    reads: bool = False

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Of the group."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The parameters that are moved."""

    @abstractmethod
    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        """exp(element)·w for an element (dimension,) of the Lie algebra: the moved parameters."""

    @abstractmethod
    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        """Zᵀ·element = d/dt exp(t·element)·w at t = 0, without forming Z."""

    def generators(self, params: Parameters) -> dict[str, Tensor]:
        """Z at w: (dimension, *shape) for each parameter that is moved."""
        one = params[self.names[0]]
        eye = torch.eye(self.dimension, dtype=one.dtype, device=one.device)
        return torch.func.vmap(lambda e: self.tangent(params, e))(eye)

    def pairing(self, params: Parameters, covector: Parameters) -> Tensor:
        """Z·v: the inner product of each generator with a vector, (dimension,).

        The tangent is linear in its element, so that this is its transpose.
        """
        one = params[self.names[0]]
        zero = torch.zeros(self.dimension, dtype=one.dtype, device=one.device)

        def against(element: Tensor) -> Tensor:
            moved = self.tangent(params, element)
            return sum((moved[n] * covector[n]).sum() for n in self.names)  # pyright: ignore

        return torch.func.grad(against)(zero)


@dataclass(frozen=True)
class Leg:
    """How one parameter takes part in a scaling.

    Attributes:
        name: of the parameter.
        unit: which unit an entry belongs to, broadcastable to the parameter's shape: (out, 1) for
            the rows of a weight, (1, in) for its columns. −1: the entry is not moved.
        power: entries are multiplied by α_unit^power.
    """

    name: str
    unit: Tensor
    power: int

    def rates(self, t: Tensor) -> Tensor:
        """power·t_unit for log-scales t (*batch, units): (*batch, *unit.shape)."""
        rest = torch.cat([t, t.new_zeros(*t.shape[:-1], 1)], -1)  # for −1: not moved
        return self.power * rest[..., self.unit.to(t.device)]

    def on(self, w: Tensor) -> Leg:
        """The leg with a unit index that has as many axes as w, on its device."""
        shape = [1] * (w.ndim - self.unit.ndim) + list(self.unit.shape)
        return Leg(self.name, self.unit.to(w.device).reshape(shape), self.power)

    @property
    def complete(self) -> bool:
        """Whether every entry belongs to a unit."""
        return not bool((self.unit < 0).any())

    def sums(self, values: Tensor, units: int) -> Tensor:
        """Σ of the entries (*batch, *shape) that belong to each unit: (*batch, units)."""
        axes = [d - self.unit.ndim for d, size in enumerate(self.unit.shape) if size == 1]
        # sum first over the axes that do not tell units apart
        summed = values.sum(axes, keepdim=True) if axes else values
        flat = summed.flatten(-self.unit.ndim) if self.unit.ndim else summed.unsqueeze(-1)
        out = flat.new_zeros(*flat.shape[:-1], units + 1)  # the last: of no unit
        return out.index_add_(-1, self.unit.flatten().to(flat.device) % (units + 1), flat)[..., :-1]


@dataclass(frozen=True)
class Scaling(Action):
    r"""w_e ← w_e α_{unit(e)}^{power}: positive numbers, one per unit.

    A unit is a neuron or channel before and after a positively homogeneous activation (incoming
    weights and bias with power 1, outgoing weights with power −1), or a whole layer.

    Attributes:
        units: how many there are.
        legs: the parameters that are scaled. One parameter may have several legs.
        about: what it is, for people.
    """

    units: int
    legs: Sequence[Leg]
    about: str = "scaling"

    @property
    def dimension(self) -> int:
        return self.units

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are scaled."""
        return tuple(dict.fromkeys(leg.name for leg in self.legs))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        rates: dict[str, Tensor] = {}
        for leg in self.legs:
            w = params[leg.name]
            rate = leg.rates(element.to(w))
            rates[leg.name] = rates[leg.name] + rate if leg.name in rates else rate
        return {name: rate * params[name].detach() for name, rate in rates.items()}

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for leg in self.legs:
            w = out.get(leg.name, params[leg.name])
            out[leg.name] = w * leg.rates(element.to(w)).exp()
        return out

    def merged(self) -> Scaling:
        """Return the scaling of all units by one common factor."""
        legs = [Leg(leg.name, leg.unit.clamp(max=0), leg.power) for leg in self.legs]
        return Scaling(1, legs, f"{self.about}, all units alike")

    def only(self, keep: Tensor) -> Scaling:
        """The units that a mask (units,) names."""
        place = torch.cat([torch.where(keep, keep.cumsum(0) - 1, -1), torch.tensor([-1])])
        legs = [Leg(leg.name, place[leg.unit], leg.power) for leg in self.legs]
        legs = [leg for leg in legs if bool((leg.unit >= 0).any())]
        return Scaling(int(keep.sum()), legs, self.about)


def two_sided(actions: Iterable[object]) -> list[Scaling]:
    """Return the scalings that multiply some weights and divide others.

    A scaling with one side only (of weights before a norm) has nothing to balance.
    """
    scalings = [a for a in actions if isinstance(a, Scaling)]
    return [s for s in scalings if len({leg.power > 0 for leg in s.legs}) == 2]


def connected(keys: Iterable[Iterable[Hashable]]) -> list[list[int]]:
    """The indices of things that common keys join: groups, each in order.

    >>> connected([["a"], ["b"], ["a", "c"], ["c"]])
    [[0, 2, 3], [1]]
    """
    groups: list[tuple[set[Hashable], list[int]]] = []
    for i, mine in enumerate(map(set, keys)):
        near = [g for g in groups if not g[0].isdisjoint(mine)]
        apart = [g for g in groups if g[0].isdisjoint(mine)]
        names = mine.union(*(names for names, _ in near))
        groups = [*apart, (names, [*(j for _, others in near for j in others), i])]
    return sorted(sorted(members) for _, members in groups)


Index = Tensor


@dataclass(frozen=True)
class Mixing(Action):
    r"""A ← M A and B ← B M⁻¹ for an invertible M: what lies between two linear maps.

    A head's values against the output projection, or its queries against its keys
    (q ← M q, k ← M⁻ᵀ k).

    Attributes:
        size: of M, (size, size).
        into: (name, rows): the rows of these parameters are mixed by M; vectors are biases.
        out: (name, columns, transposed): the columns are mixed by M⁻¹; transposed: they are rows
            of the parameter, mixed by M⁻ᵀ (the key against the query).
        about: what it is, for people.
        tables: (name, columns): tables whose rows are vectors, E ← E Mᵀ.
    """

    size: int
    into: Sequence[tuple[str, Index]]
    out: Sequence[tuple[str, Index, bool]]
    about: str = "mixing"
    tables: Sequence[tuple[str, Index]] = ()

    @property
    def dimension(self) -> int:
        return self.size**2

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _, _, _ in self.sides()))

    def sides(self) -> Iterator[tuple[str, Index, int, bool]]:
        """(name, places, axis, inverse): M, or inverse M⁻ᵀ, acts along the axis."""
        yield from ((name, rows, 0, False) for name, rows in self.into)
        yield from ((name, columns, 1, False) for name, columns in self.tables)
        yield from ((name, at, 0 if turned else 1, True) for name, at, turned in self.out)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        x = element.view(self.size, self.size)
        moved = {n: torch.zeros_like(params[n]) for n in self.names}
        for name, places, axis, inverse in self.sides():
            w = params[name].detach()
            change = _mixed_along((-x.mT if inverse else x).to(w), w, places, axis)
            moved[name] = moved[name].index_add(axis, places.to(w.device), change)
        return moved

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        x = element.view(self.size, self.size)
        matrix, inverse = torch.linalg.matrix_exp(x), torch.linalg.matrix_exp(-x).mT
        moved = {n: params[n].detach() for n in self.names}
        for name, places, axis, back in self.sides():
            w = moved[name]
            new = _mixed_along((inverse if back else matrix).to(w), w, places, axis)
            moved[name] = w.index_copy(axis, places.to(w.device), new)
        return moved


def _mixed_along(matrix: Tensor, w: Tensor, places: Tensor, axis: int) -> Tensor:
    """Σ_j M_ij w_j over the chosen places of an axis."""
    chosen = w.index_select(axis, places.to(w.device)).movedim(axis, 0)
    return torch.einsum("ij,j...->i...", matrix, chosen).movedim(0, axis)
