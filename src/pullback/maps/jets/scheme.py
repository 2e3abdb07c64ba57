"""Which derivatives a jet carries, and the combinatorics of the chain and product rules.

A derivative is a sorted tuple of axes: () is the value, (0,) is ∂₀, (0, 0, 1) is ∂₀∂₀∂₁.
A Laplacian Σ_i ∂_i∂_i over some axes is carried as one channel, since for a scalar function f

    Δ(f∘a) = f'(a) Δa + f''(a) Σ_i (∂_i a)²        Δ(ab) = aΔb + bΔa + 2 Σ_i ∂_i a ∂_i b.

`nested` has the same derivatives by nested reverse-mode differentiation, for any differentiable
function. Not forward over forward: torch gets the second derivatives of layer norms and cumulative
products wrong that way, without saying so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor
from torch.func import grad

Index = tuple[int, ...]


@dataclass(frozen=True)
class Scheme:
    """The channels of a jet: value, first derivatives, the higher ones, and a Laplacian last.

    >>> Scheme.of([(0, 0), (1,)]).indices
    ((), (0,), (1,), (0, 0))
    """

    indices: tuple[Index, ...]
    #: axes of the collapsed Laplacian, the last channel, or none
    laplacian: tuple[int, ...] = ()

    @classmethod
    def of(cls, wanted: Iterable[Index], laplacian: Iterable[int] = ()) -> Scheme:
        """The smallest scheme with these derivatives: every derivative brings its parts along."""
        axes = tuple(sorted(set(laplacian)))
        closed = {part for index in wanted for part in _parts(tuple(sorted(index)))}
        closed |= {(), *((i,) for i in axes)}
        return cls(tuple(sorted(closed, key=lambda i: (len(i), i))), axes)

    def __len__(self) -> int:
        return len(self.indices) + bool(self.laplacian)

    @cached_property
    def position(self) -> dict[Index, int]:
        """Where each derivative stands."""
        return {index: i for i, index in enumerate(self.indices)}

    @cached_property
    def order(self) -> int:
        """The highest order."""
        return max(len(self.indices[-1]), 2 if self.laplacian else 0)

    @cached_property
    def first(self) -> slice:
        """The first derivatives."""
        return slice(1, 1 + sum(len(i) == 1 for i in self.indices))

    @cached_property
    def collapsed(self) -> slice | list[int]:
        """The Laplacian's axes among the first derivatives."""
        positions = [self.position[(i,)] - 1 for i in self.laplacian]
        whole = bool(positions) and positions == list(range(positions[0], positions[-1] + 1))
        if whole:
            return slice(positions[0], positions[-1] + 1)
        return positions

    @cached_property
    def higher(self) -> tuple[Index, ...]:
        """The derivatives of order ≥ 2."""
        return self.indices[self.first.stop :]

    @cached_property
    def chain(self) -> list[list[tuple[int, tuple[int, ...]]]]:
        """Faà di Bruno for each higher derivative: [(count, channels of the blocks)]."""
        return [
            [(count, tuple(map(self.position.__getitem__, blocks))) for blocks, count in sums]
            for sums in (Counter(_partitions(index)).items() for index in self.higher)
        ]

    @cached_property
    def leibniz(self) -> list[list[tuple[int, int, int]]]:
        """Leibniz for each higher derivative: [(count, channel of a, channel of b)]."""
        return [
            [
                (count, self.position[one], self.position[two])
                for (one, two), count in Counter(_splits(index)).items()
            ]
            for index in self.higher
        ]


def _parts(index: Index) -> Iterator[Index]:
    """All sub-multisets."""
    for k in range(len(index) + 1):
        yield from combinations(index, k)


def _splits(index: Index) -> Iterator[tuple[Index, Index]]:
    """All ways of giving each derivative to one of two factors."""
    positions = range(len(index))
    for k in range(len(index) + 1):
        for chosen in combinations(positions, k):
            rest = tuple(index[i] for i in positions if i not in chosen)
            yield tuple(index[i] for i in chosen), rest


def _partitions(index: Index) -> Iterator[tuple[Index, ...]]:
    """All set partitions of the positions, as sorted blocks of axes."""
    if not index:
        yield ()
        return
    head = index[0]
    tail = index[1:]
    positions = range(len(tail))
    for k in range(len(tail) + 1):
        for chosen in combinations(positions, k):
            block = tuple(sorted((head, *(tail[i] for i in chosen))))
            for rest in _partitions(tuple(tail[i] for i in positions if i not in chosen)):
                yield tuple(sorted((block, *rest)))


Function = Callable[[Tensor], Tensor]


def nested(function: Function, x: Tensor, scheme: Scheme) -> Tensor:
    """The channels (T, B, m) of function(x) for points x (B, d) that do not see each other."""
    value = function(x)
    columns = []
    for j, column in enumerate(value.unbind(-1)):
        found = _derivatives(lambda y, j=j: function(y)[..., j], x, scheme)
        found[()] = column
        channels = [found[index] for index in scheme.indices]
        if scheme.laplacian:
            channels.append(torch.stack([found[i, i] for i in scheme.laplacian]).sum(0))
        columns.append(torch.stack(channels))
    return torch.stack(columns, -1)


def _derivatives(function: Function, x: Tensor, scheme: Scheme) -> dict[Index, Tensor]:
    """All derivatives of a scalar function's values (B,): one gradient gives those of all axes."""
    wanted = [*scheme.indices[1:], *((i, i) for i in scheme.laplacian)]
    found: dict[Index, Tensor] = {}
    for inner in {index[:-1] for index in wanted}:
        f = function
        for axis in inner:
            f = _partial(f, axis)
        gradient = _gradient(f)(x)
        found.update({(*inner, i): gradient[:, i] for i in range(x.shape[-1])})
    return found


def _partial(function: Function, axis: int) -> Function:
    return lambda x: _gradient(function)(x)[:, axis]


def _gradient(function: Function) -> Function:
    """x ↦ ∂f(x_b)/∂x_b for every point b, (B, d)."""
    return grad(lambda x: function(x).sum())
