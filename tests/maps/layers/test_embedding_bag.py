"""Moments of bags of indices, against the dense matrix of their counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pullback.maps.layers.embedding import BagUse, EmbeddingBag
from pullback.maps.layers.moments import Sharing

DOUBLE = torch.float64


@pytest.mark.parametrize("is_masked", [False, True])
def test_moments_are_those_of_the_dense_bags(is_masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 3, dtype=DOUBLE, generator=generator)
    index = torch.randint(0, 7, (9, 12), generator=generator)  # indices repeat
    weights = torch.randn(9, 12, dtype=DOUBLE, generator=generator)
    keep = torch.rand(9, generator=generator) < 0.6 if is_masked else None
    dense = torch.zeros(9, 7, dtype=DOUBLE).scatter_add_(1, index, weights)
    if keep is not None:
        dense = dense[keep]
    moments = EmbeddingBag().input_moments(BagUse(table, weights), index, Sharing(), keep)
    torch.testing.assert_close(moments.second[0], dense.square().sum(0))
    torch.testing.assert_close(moments.first[0], dense.sum(0))
    assert float(moments.positions) == len(dense)


def test_a_large_table_is_not_multiplied_by_the_number_of_bags() -> None:
    """A dense matrix of the counts would take 160 GB here."""
    table = nn.Parameter(torch.zeros(10**7, 2))
    index = torch.randint(0, 10**7, (4096, 3))
    use = BagUse(table, torch.ones(4096, 3))
    moments = EmbeddingBag().input_moments(use, index, Sharing(), None)
    assert float(moments.second.sum()) >= 4096 * 3
