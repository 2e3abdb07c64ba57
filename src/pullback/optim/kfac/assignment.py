"""Which rule every parameter follows, and why: parameter → kind → rule.

Before the first statistics the kinds of modules say what is expected; what statistics then find
decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.shards import get_local_piece, is_sharded
from ..._core.space import compute_dtype
from ...grams.kronecker.packed_matrix import get_entries
from ...maps.roles import Role
from .factors.block import BlockKey, BlockKind, Factors, FactorSide, block_shape, is_dense
from .options import Options
from .rules import BlockShape, Rule
from .statistics.plan import Forecast, forecast


@dataclass
class Assignment:
    """The table of all parameters of the param groups.

    Attributes:
        rule: for matrices, or for all that it accepts.
        others: the rule for all other parameters; None where there are none.
        measured: the parameters that are expected to follow the rule, by name.
        elementwise: those that follow the rule for others.
        expected: what the kinds of modules say.
    """

    rule: Rule
    others: Rule | None
    measured: list[str] = field(default_factory=list)
    elementwise: list[str] = field(default_factory=list)
    expected: Forecast | None = None

    @property
    def takes_all(self) -> bool:
        """Whether the rule is for every parameter."""
        return self.rule.accepts(Role.VECTOR)

    def assign(
        self,
        model: nn.Module,
        params: Mapping[str, Tensor],
        chosen: Collection[str],
        apart: Collection[str],
        options: Options,
    ) -> None:
        """Settle which of the chosen parameters follow the rule; those `apart` never do."""
        self.expected = forecast(model, params, options)
        candidates = [n for n in chosen if n not in apart and params[n].numel()]
        self.measured = candidates
        if not self.takes_all:
            fitting = {*self._expected_matrices(params)}
            self.measured = [n for n in candidates if n in fitting]
        elif self.rule.is_elementwise:
            self.measured = []
        expected = {*self.measured}
        self.elementwise = [n for n in chosen if n not in expected and params[n].numel()]

    def _expected_matrices(self, params: Mapping[str, Tensor]) -> Iterable[str]:
        """Yield the weights that the rule is for, and what no known module uses.

        What is done with the latter may show that it is a matrix.
        """
        assert self.expected is not None
        for key, factors in self.expected.factors.items():
            if not key.kronecker or key.bias or is_of_vectors(factors):
                continue
            is_last = key.names[0] == self.expected.last
            role = Role.HEAD if is_last else Role.MATRIX
            if self.rule.accepts(role) and self.rule.fits(shape_of(key, factors)):
                yield key.names[0]
        for name, p in params.items():
            is_known = name in self.expected.kinds
            if not is_known and p.ndim > 1 and min(p.shape[-2:]) > 1:
                yield name

    def takes(self, key: BlockKey, factors: Factors) -> bool:
        """Return whether a block follows the rule, and not the rule for others."""
        if self.takes_all:
            return True
        is_weight = key.kronecker and not key.bias and not is_of_vectors(factors)
        return is_weight and self.rule.fits(shape_of(key, factors))


def shape_of(key: BlockKey, factors: Factors) -> BlockShape:
    """Return the shape of a block that has these factors."""
    size = block_shape(key, factors)
    like = get_entries(next(iter(factors.values())))
    split: tuple[int, ...] = ()
    if key.kronecker and size[1] == 3 * size[2]:  # fused queries, keys and values
        split = (size[2],) * 3
    return BlockShape(
        kind=BlockKind(key.kind),
        size=size,
        dense_rows=is_dense(factors, FactorSide.LEFT),
        dense_columns=is_dense(factors, FactorSide.RIGHT),
        dtype=like.dtype,
        device=like.device,
        split=split,
    )


def entries_of(name: str, p: Any) -> tuple[BlockKey, BlockShape]:
    """Return the block of a parameter's entries, or of those that this process has."""
    piece = get_local_piece(p) if is_sharded(p) else p
    dtype = compute_dtype(p.dtype)
    size = (1, piece.numel())
    shape = BlockShape(BlockKind.ENTRIES, size, False, False, dtype, torch.device(p.device))
    return BlockKey(BlockKind.ENTRIES, (name,)), shape


def is_of_vectors(factors: Factors) -> bool:
    """Return whether a block is a stack of single rows, as filters of a depthwise convolution."""
    shapes = [t.shape for t in factors.values()]
    return shapes[0][0] > 1 and any(shape[-1] == 1 for shape in shapes)
