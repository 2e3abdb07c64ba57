"""K-FAC on N processes is K-FAC of one process on the joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pullback as pb

from .training import MODELS, train
from .world import World

CATEGORICAL = pb.likelihoods.Categorical()
NATURAL: dict[str, Any] = {"likelihood": CATEGORICAL, "fisher": "exact"}
UNEVEN = (5, 2, 4)


def equal(
    world: World, kind: str, options: dict[str, Any], counts: tuple[int, ...] = UNEVEN, **how: Any
) -> None:
    """The processes' parameters are the same bits, and those of one process to round-off."""
    found = world.run(_train, kind, counts, options, how, size=len(counts))
    want = train(0, 1, kind, counts, options, **how)
    for name, p in want.items():
        for other in found[1:]:
            assert torch.equal(found[0][name], other[name]), name
        torch.testing.assert_close(found[0][name], p, rtol=1e-10, atol=1e-10)


def _train(
    rank: int, size: int, kind: str, counts: Any, options: Any, how: dict[str, Any]
) -> dict[str, torch.Tensor]:
    return train(rank, size, kind, counts, options, **how)


@pytest.mark.parametrize("kind", MODELS)
def test_layers(world: World, kind: str) -> None:
    equal(world, kind, NATURAL)
