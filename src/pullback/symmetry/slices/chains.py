r"""Layers in a row: what the paper's slice of equal norms is made of.

Merged scalings e^{t_1}, …, e^{t_{ℓ−1}} of a chain act on its ℓ blocks (A_k, b_k): A_k lies between
the scalings k − 1 and k and is multiplied by e^{t_k − t_{k−1}}, b_k only leads into the k-th and is
multiplied by e^{t_k}. The last block has no b, and t_0 = t_ℓ = 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..actions.scaling import Scaling


@dataclass(frozen=True)
class Block:
    """One layer of a chain.

    Attributes:
        inner: parameters between two scalings, A_k; in the first block all of its parameters.
        outer: parameters that only lead into the next scaling, b_k.
    """

    inner: tuple[str, ...]
    outer: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of its parameters."""
        return self.inner + self.outer

    def weights(self, params: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The parameters without biases: matrices, or where there are none what is no bias."""
        matrices = tuple(n for n in self.names if params[n].ndim > 1)
        named = tuple(n for n in self.names if not n.endswith("bias"))
        return matrices or named or self.names


@dataclass(frozen=True)
class Chain:
    """The scalings of a chain by index, in order, and its blocks, one more."""

    scalings: tuple[int, ...]
    blocks: tuple[Block, ...]


def components(scalings: Sequence[Scaling]) -> list[tuple[int, ...]]:
    """Scalings that are joined by common parameters, by index."""
    left = {i: set(s.names) for i, s in enumerate(scalings)}
    out = []
    while left:
        first, names = left.popitem()
        found = [first]
        while joined := [i for i, other in left.items() if not names.isdisjoint(other)]:
            for i in joined:
                names |= left.pop(i)
            found += joined
        out.append(tuple(sorted(found)))
    return sorted(out)


def blocks(scalings: Sequence[Scaling], component: Sequence[int]) -> tuple[Block, ...]:
    """The layers of a component: what leads into each scaling, and what only leads out of one."""
    into, out = _sides(scalings, component)
    leads = set().union(*out.values())
    entered = set().union(*into.values())
    found = []
    for i in component:
        inner = tuple(n for n in into[i] if n in leads)
        rest = tuple(n for n in into[i] if n not in leads)
        found.append(Block(inner, rest) if inner else Block(rest, ()))
    for i in component:
        last = tuple(n for n in out[i] if n not in entered)
        if last:
            found.append(Block(last, ()))
    return tuple(found)


def layers_of(scalings: Sequence[Scaling]) -> list[list[tuple[str, ...]]]:
    """The parameters of each layer, for every component."""
    return [[b.names for b in blocks(scalings, part)] for part in components(scalings)]


def chain(scalings: Sequence[Scaling], component: Sequence[int]) -> Chain | None:
    """The component as a chain, or None where it branches, or scales by other powers or in part."""
    into, out = _sides(scalings, component)
    legs = [leg for i in component for leg in scalings[i].legs]
    if any(abs(leg.power) != 1 or not leg.complete for leg in legs):
        return None
    after: dict[int, int | None] = {}
    for i in component:
        targets = {next((j for j in component if n in into[j]), None) for n in out[i]}
        if len(targets) != 1:
            return None
        after[i] = targets.pop()
    starts = set(component) - set(after.values())
    if len(starts) != 1 or len(set(after.values())) != len(component):
        return None
    order = [starts.pop()]
    while (following := after[order[-1]]) is not None:
        order.append(following)
    # a parameter inside must leave exactly one scaling
    left = [n for i in order for n in out[i]]
    if len(order) != len(component) or len(set(left)) != len(left):
        return None
    return Chain(tuple(order), blocks(scalings, order))


def _sides(
    scalings: Sequence[Scaling], component: Sequence[int]
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    into = {i: [leg.name for leg in scalings[i].legs if leg.power > 0] for i in component}
    out = {i: [leg.name for leg in scalings[i].legs if leg.power < 0] for i in component}
    return into, out
