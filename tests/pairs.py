"""Of a product of choices, the few cases that hold every choice, or every pair of choices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def all_pairs(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes, to parametrize with; the cases that repeat pairs are slow.

    Two choices that do not go together fail in any case that holds both.

    >>> quick = [p.values for p in all_pairs("ab", "cd", "ef") if not p.marks]
    >>> len(quick), {(x, z) for x, _, z in quick} == {*product("ab", "ef")}
    (4, True)
    """
    return covering([*product(*axes)])


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """The product of the axes; the cases that repeat choices are slow.

    >>> [p.values for p in each_once("abc", "de") if not p.marks]
    [('a', 'd'), ('b', 'e'), ('c', 'd')]
    """
    choices = [[*axis] for axis in axes]
    sizes = [len(axis) for axis in choices]
    chosen = {tuple(i % size for size in sizes) for i in range(max(sizes))}
    all_indices = product(*map(range, sizes))
    return _marked([*product(*choices)], [indices in chosen for indices in all_indices])


def quick_products(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """The product of two axes; every choice of the first occurs with two of the second.

    The other cases are slow.

    >>> [p.values for p in quick_products("ab", "cdef") if not p.marks]
    [('a', 'c'), ('a', 'd'), ('b', 'e'), ('b', 'f')]
    """
    rows = [*first]
    columns = [*second]
    chosen = set[tuple[int, int]]()
    for i in range(len(rows)):
        chosen |= {(i, (2 * i + shift) % len(columns)) for shift in range(2)}
    indices = product(range(len(rows)), range(len(columns)))
    return _marked([*product(rows, columns)], [pair in chosen for pair in indices])


def covering(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Mark cases slow, but for a few in which all pairs occur; the most missing ones first."""
    pairs = [{*combinations(enumerate(map(id, case)), 2)} for case in cases]
    missing = set().union(*pairs)
    remaining = {*range(len(cases))}
    chosen = set[int]()
    while missing:
        best = max(remaining, key=lambda i: (len(pairs[i] & missing), -i))
        remaining.remove(best)
        chosen.add(best)
        missing -= pairs[best]
    return _marked(cases, [i in chosen for i in range(len(cases))])


def _marked(cases: Sequence[tuple[Any, ...]], quick: Sequence[bool]) -> list[Any]:
    return [
        pytest.param(*case, marks=() if often else pytest.mark.slow)
        for case, often in zip(cases, quick, strict=True)
    ]
