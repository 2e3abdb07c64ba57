"""Statistics of losses that are stated on derivatives of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....grams import RowBlock
from ....grams.kronecker.packed_matrix import pack
from ....maps.layers import AffineBlock
from ..factors.block import DIAGONAL, BlockKey, BlockKind, FactorKey, FactorSide
from ..options import Options
from .covectors import draw_signs
from .sums import Pool


def average_terms(
    terms: Sequence[RowBlock], options: Options, generator: torch.Generator
) -> dict[BlockKey, dict[FactorKey, Any]]:
    """Return means for losses stated on derivatives of the network: one Kronecker product per term.

    Each derivative that a term carries forward is one more position that shares a layer's weight,
    with the homogeneous coordinate 1 at the value and 0 at its derivatives.
    """
    pool = Pool()
    for number, term in enumerate(terms):
        covectors = _form_term_covectors(term, options, generator)
        for block in term.linearization.pullback_factored(covectors).blocks.values():
            if isinstance(block, AffineBlock) and block.weight is not None:
                sums = pool.of(BlockKey(BlockKind.KRONECKER, block.names))
                left, right = block.sides(options.sharing.longest)
                use = f"term {number}"
                sums.values[FactorKey(use, FactorSide.ROWS)] = pack(left)
                sums.values[FactorKey(use, FactorSide.COLUMNS)] = pack(right)
                continue
            for name, rows in block.rows().items():
                squares = rows.square().sum((0, 1))[:, None, None]
                pool.of(BlockKey(BlockKind.DIAGONAL, (name,))).add(DIAGONAL, squares)
    return {key: sums.values for key, sums in pool.sums.items()}


def _form_term_covectors(term: RowBlock, options: Options, generator: torch.Generator) -> Any:
    """Return covectors of a term: columns of its factor, or for "mc" one random combination."""
    value = term.linearization.value
    if options.fisher == "mc":
        shape = (1, len(value), *term.factor.white)
        return term.factor.apply(draw_signs(shape, value, generator))
    return term.factor.covectors(value)
