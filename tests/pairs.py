"""Of a product of choices, the few cases that hold every choice, or every pair of choices."""

from __future__ import annotations

from collections import Counter
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
    return covering([*product(*axes)], 1)


def covering(cases: Sequence[tuple[Any, ...]], strength: int = 2) -> list[Any]:
    """Mark cases slow, but for a few in which all combinations of `strength` values occur.

    Chosen is what has the most combinations that are missing, and values that are rare so far.
    """
    values = [[*enumerate(map(id, case))] for case in cases]
    found = [{*combinations(case, strength)} for case in values]
    missing, rest, chosen = set().union(*found), {*range(len(cases))}, set[int]()
    often = Counter[tuple[int, int]]()
    while missing:
        best = max(
            rest, key=lambda i: (len(found[i] & missing), -sum(often[v] for v in values[i]), -i)
        )
        rest.remove(best)
        chosen.add(best)
        missing -= found[best]
        often.update(values[best])
    return [
        pytest.param(*case, marks=() if i in chosen else pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
