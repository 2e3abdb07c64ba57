"""Connected components of things that share keys."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class _Component:
    """Indices of items, and the keys of all of them."""

    keys: frozenset[Hashable]
    indices: tuple[int, ...]


def connected_components(item_keys: Iterable[Iterable[Hashable]]) -> list[list[int]]:
    """Return groups of item indices; items with a common key are in one group.

    Indices are sorted within each group, and groups by their first index.

    >>> connected_components([["a"], ["b"], ["a", "c"], ["c"]])
    [[0, 2, 3], [1]]
    """
    components: list[_Component] = []
    for index, keys in enumerate(map(frozenset, item_keys)):
        touching = [c for c in components if not c.keys.isdisjoint(keys)]
        separate = [c for c in components if c.keys.isdisjoint(keys)]
        indices = [index]
        for component in touching:
            keys = keys | component.keys
            indices.extend(component.indices)
        components = [*separate, _Component(keys, tuple(indices))]
    return sorted(sorted(component.indices) for component in components)
