"""The Gram of two blocks as a matrix."""

from __future__ import annotations

from torch import Tensor

from pullback._core.products import mirror_lower_triangle
from pullback.maps.layers import Block


def gram(one: Block, two: Block, budget: int = 2**30) -> Tensor:
    sides = [next(iter(block.rows().values())).shape[:2].numel() for block in (one, two)]
    out = next(iter(one.rows().values())).new_zeros(*sides)
    one.add_gram(out, two, budget)
    if two is one:
        return mirror_lower_triangle(out)
    return out
