"""Which derivatives a jet carries, and the combinatorics of the chain and product rules.

A derivative is a sorted tuple of axes: () is the value, (0,) is ∂₀, (0, 0, 1) is ∂₀∂₀∂₁.
A Laplacian Σ_i ∂_i∂_i over some axes is carried as one channel, since for a scalar function f

    Δ(f∘a) = f'(a) Δa + f''(a) Σ_i (∂_i a)²        Δ(ab) = aΔb + bΔa + 2 Σ_i ∂_i a ∂_i b.

`differentiate_nested` gives the same derivatives by nested reverse-mode differentiation, for any
differentiable function. It does not use forward over forward mode: there torch gets the second
derivatives of layer norms and cumulative products wrong, without an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

Index = tuple[int, ...]


class ChainTerm(NamedTuple):
    """A term multiplicity · f⁽ᵏ⁾ · ∏ ∂^block a of Faà di Bruno's formula."""

    multiplicity: int
    #: the channels of the k blocks
    blocks: tuple[int, ...]


class ProductTerm(NamedTuple):
    """A term multiplicity · ∂^left a · ∂^right b of Leibniz' formula."""

    multiplicity: int
    #: channels of a and b
    left: int
    right: int


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
    def of(cls, derivatives: Iterable[Index], laplacian: Iterable[int] = ()) -> Scheme:
        """Return the smallest scheme with these derivatives and all that they are made from."""
        axes = tuple(sorted(set(laplacian)))
        indices: set[Index] = {()}
        for index in derivatives:
            indices.update(_list_subsets(tuple(sorted(index))))
        indices.update((axis,) for axis in axes)
        return cls(tuple(sorted(indices, key=lambda index: (len(index), index))), axes)

    def __len__(self) -> int:
        return len(self.indices) + bool(self.laplacian)

    @cached_property
    def position(self) -> dict[Index, int]:
        """The number of each derivative's channel."""
        return {index: i for i, index in enumerate(self.indices)}

    @cached_property
    def order(self) -> int:
        """The highest order."""
        highest = len(self.indices[-1])
        if self.laplacian:
            return max(highest, 2)
        return highest

    @cached_property
    def first(self) -> slice:
        """The first derivatives."""
        return slice(1, 1 + sum(len(i) == 1 for i in self.indices))

    @cached_property
    def laplacian_positions(self) -> slice | list[int]:
        """Where the Laplacian's axes stand among the first derivatives, a slice if possible."""
        positions = [self.position[(i,)] - 1 for i in self.laplacian]
        if positions and positions == list(range(positions[0], positions[-1] + 1)):
            return slice(positions[0], positions[-1] + 1)
        return positions

    @cached_property
    def higher(self) -> tuple[Index, ...]:
        """The derivatives of order ≥ 2."""
        return self.indices[self.first.stop :]

    @cached_property
    def chain(self) -> list[list[ChainTerm]]:
        """For each higher derivative the terms of Faà di Bruno's formula."""
        return [self._chain_terms(index) for index in self.higher]

    def _chain_terms(self, index: Index) -> list[ChainTerm]:
        terms = []
        for blocks, count in Counter(_list_partitions(index)).items():
            channels = tuple(self.position[block] for block in blocks)
            terms.append(ChainTerm(count, channels))
        return terms

    @cached_property
    def leibniz(self) -> list[list[ProductTerm]]:
        """For each higher derivative the terms of Leibniz' formula."""
        return [self._product_terms(index) for index in self.higher]

    def _product_terms(self, index: Index) -> list[ProductTerm]:
        terms = []
        for split, count in Counter(_list_splits(index)).items():
            left, right = split
            terms.append(ProductTerm(count, self.position[left], self.position[right]))
        return terms


def _list_subsets(index: Index) -> Iterator[Index]:
    """Yield all sub-multisets of a derivative's axes."""
    for size in range(len(index) + 1):
        yield from combinations(index, size)


def _list_splits(index: Index) -> Iterator[tuple[Index, Index]]:
    """Yield all ways to give each derivative to one of two factors."""
    positions = range(len(index))
    for size in range(len(index) + 1):
        for chosen in combinations(positions, size):
            left = tuple(index[i] for i in chosen)
            right = tuple(index[i] for i in positions if i not in chosen)
            yield left, right


def _list_partitions(index: Index) -> Iterator[tuple[Index, ...]]:
    """Yield all set partitions of the positions, as sorted blocks of axes."""
    if not index:
        yield ()
        return
    for chosen, others in _list_splits(index[1:]):
        block = tuple(sorted((index[0], *chosen)))
        for blocks in _list_partitions(others):
            yield tuple(sorted((block, *blocks)))


Function = Callable[[Tensor], Tensor]


def differentiate_nested(function: Function, x: Tensor, scheme: Scheme) -> Tensor:
    """Return the channels (T, B, m) of function(x) by nested reverse-mode differentiation.

    The value at one of the points x (B, d) must not depend on the others.
    """
    value = function(x)
    columns = []
    for j, column in enumerate(value.unbind(-1)):
        derivatives = _differentiate_scalar(lambda y, j=j: function(y)[..., j], x, scheme)
        derivatives[()] = column
        channels = [derivatives[index] for index in scheme.indices]
        if scheme.laplacian:
            channels.append(torch.stack([derivatives[i, i] for i in scheme.laplacian]).sum(0))
        columns.append(torch.stack(channels))
    return torch.stack(columns, -1)


def _differentiate_scalar(function: Function, x: Tensor, scheme: Scheme) -> dict[Index, Tensor]:
    """Return the scheme's derivatives of a scalar function's values (B,).

    One gradient gives the derivatives along all axes.
    """
    indices = [*scheme.indices[1:], *((i, i) for i in scheme.laplacian)]
    derivatives: dict[Index, Tensor] = {}
    for inner in {index[:-1] for index in indices}:
        f = function
        for axis in inner:
            f = _make_partial(f, axis)
        gradient = _make_gradient(f)(x)
        derivatives.update({(*inner, i): gradient[:, i] for i in range(x.shape[-1])})
    return derivatives


def _make_partial(function: Function, axis: int) -> Function:
    """Return the function x ↦ ∂f(x_b)/∂x_b,axis."""
    return lambda x: _make_gradient(function)(x)[:, axis]


def _make_gradient(function: Function) -> Function:
    """Return the function x ↦ ∂f(x_b)/∂x_b, (B, d)."""
    return grad(lambda x: function(x).sum())
