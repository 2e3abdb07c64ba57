"""Accelerate's loop takes the steps of a loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kfac_options import kfac_of

from .common import (
    LENGTH,
    NATURAL,
    SPECTRAL,
    LazyPackage,
    batches,
    gpt2,
    needs,
    train_accelerated,
    vector,
)

pytestmark = needs("accelerate", "transformers")
accelerate: Any = LazyPackage("accelerate")


@pytest.fixture(autouse=True)
def _no_mixed_precision_left() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def by_hand(kfac: dict[str, Any], dtype: torch.dtype = torch.float64, half: bool = False) -> Tensor:
    model = gpt2(dtype=dtype).train()
    x, y = batches(64)
    opt = kfac_of(model, **kfac)
    for tokens, target in zip(x.split(16), y.split(16), strict=True):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            z = model(input_ids=tokens, position_ids=torch.arange(LENGTH).expand(16, LENGTH)).logits
        if half:
            z = z.float()
        F.cross_entropy(z.flatten(0, 1), target.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return vector(model)


@pytest.mark.parametrize(
    "kfac",
    [
        pytest.param(NATURAL, id="natural", marks=pytest.mark.slow),
        pytest.param(SPECTRAL, id="spectral"),
    ],
)
def test_accumulated_batches_are_one(kfac: dict[str, Any]) -> None:
    torch.testing.assert_close(train_accelerated(0, 1, kfac), by_hand(kfac), rtol=1e-10, atol=1e-10)


def test_bfloat16_with_outputs_in_float32() -> None:
    kfac = {**NATURAL, "fisher": "empirical"}
    actual = train_accelerated(0, 1, kfac, micro=1, dtype=torch.float32, mixed_precision="bf16")
    assert torch.equal(actual, by_hand(kfac, torch.float32, half=True))
