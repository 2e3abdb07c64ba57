r"""A parameter that is used twice is scaled in one way.

The entries of a weight have log-scales w_ij = r_i + c_j, a sum of *legs* that tell rows or columns
apart. Two uses agree if r_i + c_j = r'_i + c'_j, that is for some number γ

    r_i − r'_i = γ = c'_j − c_j        for all rows i and columns j.

Columns that read structural zeros (a recurrent layer at its first step) demand nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scales import FIXED, ZERO, Scales, pairwise

Legs = dict[tuple[int, ...], Tensor]


def alike(scales: Scales, before: Legs, now: Legs) -> Legs:
    """Add the equations between two uses' legs; those of both."""
    keys = [k for k in {**before, **now} if not any(_within(k, m) for m in {**before, **now})]
    one, two = (_on(scales, legs, keys) for legs in (before, now))
    if len(keys) == 2 and not _overlap(*keys):
        return _up_to_a_number(scales, one, two, keys)
    # sufficient, and for one leg necessary
    return {k: scales.unify(one[k], two[k]) for k in keys}


def _within(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Whether a leg of one shape is broadcast to another, larger one."""
    return small != large and all(a in (1, b) for a, b in zip(small, large, strict=True))


def _overlap(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    return any(a > 1 and b > 1 for a, b in zip(one, two, strict=True))


def _on(scales: Scales, legs: Legs, keys: list[tuple[int, ...]]) -> Legs:
    """The same sum by legs of these shapes."""
    out = {k: torch.full(k, FIXED) for k in keys}
    for shape, labels in legs.items():
        key = next(k for k in keys if shape == k or _within(shape, k))
        out[key] = scales.product(out[key], labels)
    return out


def _up_to_a_number(scales: Scales, one: Legs, two: Legs, keys: list[tuple[int, ...]]) -> Legs:
    """Rows and columns, with γ from the latter."""
    rows, columns = keys
    dims = range(len(columns))
    gamma = scales.merge(_difference(scales, two[columns], one[columns]), dims)
    gamma = gamma.clamp(min=FIXED)  # no column in common: a number of our choice
    shift = _difference(scales, one[rows], two[rows])
    scales.unify(shift, gamma)
    filled = torch.where(
        one[columns] == ZERO, scales.product(two[columns], gamma, -1), one[columns]
    )
    other = torch.where(one[rows] == ZERO, scales.product(two[rows], gamma), one[rows])
    return {rows: other, columns: filled}


def _difference(scales: Scales, a: Tensor, b: Tensor) -> Tensor:
    """a − b, and ZERO where either is."""

    def less(x: int, y: int) -> int:
        if ZERO in (x, y):
            return ZERO
        total = dict(scales.forms[x])
        for atom, power in scales.forms[y]:
            total[atom] = total.get(atom, 0) - power
        return scales.label(scales.solved(tuple(sorted((a, k) for a, k in total.items() if k))))

    return pairwise(a, b, less)
