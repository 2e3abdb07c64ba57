"""Kronecker statistics of losses that are stated on derivatives of the network.

The terms' maps carry derivatives forward through the layers: each of them is one more place that
shares a layer's weight, with the homogeneous coordinate 1 at the value and 0 at its derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....grams import Part
from ....maps.layers import AffineBlock
from ....maps.layers.base import Block
from .pool import Recipe
from .sums import Key


def statistics_of(
    parts: Sequence[Part], fisher: str, recipe: Recipe, generator: torch.Generator
) -> dict[Key, dict[str, Tensor]]:
    """Averages by block, one Kronecker product per term of the loss."""
    found: dict[Key, dict[str, Tensor]] = {}
    for number, part in enumerate(parts):
        value = part.linear.value
        if fisher == "mc":
            shape = (1, len(value), *part.factor.white)
            coins = torch.randint(0, 2, shape, device=value.device, generator=generator)
            covectors = part.factor.apply((2 * coins - 1).to(value.dtype))
        else:
            covectors = part.factor.covectors(value)
        pulled = part.linear.factored(covectors)
        for block in pulled.blocks.values():
            _add(found, block, number, recipe)
    return found


def _add(found: dict[Key, dict[str, Tensor]], block: Block, number: int, recipe: Recipe) -> None:
    if isinstance(block, AffineBlock) and block.weight is not None:
        left, right = block.sides(recipe.sharing.longest)
        key = Key("kronecker", block.names)
        tag = f"term {number}.last"
        found.setdefault(key, {}).update({f"{tag}.outputs": left, f"{tag}.inputs": right})
        return
    for name, rows in block.rows().items():
        key = Key("diagonal", (name,))
        squares = rows.square().sum((0, 1))[:, None, None]
        held = found.setdefault(key, {})
        held["squares"] = held["squares"] + squares if "squares" in held else squares
