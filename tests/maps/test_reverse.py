"""Reverse passes for many covectors at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback.maps.structure import vectorized
from pullback.testing import assert_close

NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)), (6, 4)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        (5, 2, 4, 4),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), (3, 5, 4)),
}


@pytest.mark.parametrize("name", NETS)
def test_they_are_those_of_one_covector_each(name: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    model = make().double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    z = model(x)
    u = torch.randn(4, *z.shape, dtype=torch.float64)
    unused = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    inputs = [*model.parameters(), unused, x]
    got = vectorized(z, inputs, u)
    for r in range(4):
        want = torch.autograd.grad(z, inputs, u[r], retain_graph=True, allow_unused=True)
        for one, two in zip(got, want, strict=True):
            assert (one is None) == (two is None)
            if one is not None and two is not None:
                assert_close(one[r], two, 1e-12, name)


class Stubborn(torch.autograd.Function):
    """x ↦ 2x, which torch.func's vmap does not know how to pull back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009
        if functorch.maybe_current_level() is not None:
            raise RuntimeError("no vmap here")
        return 2 * grads[0]


def test_where_it_cannot_the_older_rules_serve() -> None:
    x = torch.ones(3, requires_grad=True)
    got = vectorized(Stubborn.apply(x), [x], torch.eye(3))[0]
    assert got is not None
    assert torch.equal(got, 2 * torch.eye(3))
