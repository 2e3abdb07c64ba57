"""Layers that scalings connect: what leads into each scaling, what leads out, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .actions.components import connected_components
from .actions.scaling import Scaling

#: the names of the parameters of each layer
Layers = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Sides:
    """The parameters of the scalings of a component, by the number of the scaling.

    Attributes:
        into: that are multiplied.
        out: that are divided.
    """

    into: dict[int, list[str]]
    out: dict[int, list[str]]

    @classmethod
    def read(cls, scalings: Sequence[Scaling], component: Sequence[int]) -> _Sides:
        """Read the sides off the scalings' legs."""
        into: dict[int, list[str]] = {}
        out: dict[int, list[str]] = {}
        for i in component:
            into[i] = [leg.name for leg in scalings[i].legs if leg.power > 0]
            out[i] = [leg.name for leg in scalings[i].legs if leg.power < 0]
        return cls(into, out)

    def find_followers(self, number: int) -> set[int | None]:
        """Return the scalings that the divided parameters lead into; None stands for no scaling."""
        followers: set[int | None] = set()
        for name in self.out[number]:
            followers.add(next((j for j, names in self.into.items() if name in names), None))
        return followers


def find_components(scalings: Sequence[Scaling]) -> list[list[int]]:
    """Return numbers of scalings that share parameters, in groups."""
    return connected_components(scaling.names for scaling in scalings)


def list_layers(scalings: Sequence[Scaling]) -> list[Layers]:
    """Return the names of each layer's parameters, for every component."""
    components = find_components(scalings)
    return [list_component_layers(scalings, component) for component in components]


def list_component_layers(scalings: Sequence[Scaling], component: Sequence[int]) -> Layers:
    """Return what leads into each scaling, then what only leads out.

    Of a layer's parameters, weights between two scalings come first.
    """
    sides = _Sides.read(scalings, component)
    leaving = set().union(*sides.out.values())
    entering = set().union(*sides.into.values())
    layers: list[tuple[str, ...]] = []
    for i in component:
        layers.append(tuple(sorted(sides.into[i], key=lambda name: name not in leaving)))
    for i in component:
        last_layer = tuple(name for name in sides.out[i] if name not in entering)
        if last_layer:
            layers.append(last_layer)
    return tuple(layers)


def order_chain(scalings: Sequence[Scaling], component: Sequence[int]) -> list[int] | None:
    """Return a component in order; None where it branches, or scales by other powers or in part."""
    if not all(_is_simple(scalings[i]) for i in component):
        return None
    sides = _Sides.read(scalings, component)
    followers: dict[int, int | None] = {}
    for i in component:
        targets = sides.find_followers(i)
        if len(targets) != 1:
            return None
        followers[i] = targets.pop()
    order = _follow(followers)
    if order is None:
        return None
    # A parameter inside the chain must leave exactly one scaling.
    leaving = [name for i in order for name in sides.out[i]]
    if len(set(leaving)) != len(leaving):
        return None
    return order


def _is_simple(scaling: Scaling) -> bool:
    """Return True if all entries of the parameters are multiplied or divided by the factor."""
    return all(abs(leg.power) == 1 and leg.is_complete for leg in scaling.legs)


def _follow(followers: dict[int, int | None]) -> list[int] | None:
    """Return the chain of followers up to None; None if it does not contain all of them."""
    starts = set(followers) - set(followers.values())
    if len(starts) != 1 or len(set(followers.values())) != len(followers):
        return None
    order = [starts.pop()]
    while (following := followers[order[-1]]) is not None:
        order.append(following)
    if len(order) != len(followers):
        return None
    return order
