"""Reverse passes for many covectors at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback.maps import Call, ModuleMap
from pullback.testing import assert_close, jacobian

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
    x = torch.randn(shape, dtype=torch.float64)
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    u = torch.randn(4, *linear.value.shape, dtype=torch.float64)
    unused = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    inputs = [*linear.leaves.values(), unused, *(e.edge for e in linear.entries)]
    computed_gradients = linear.gradients(u, inputs, batched=True)
    for r in range(4):
        for one, two in zip(computed_gradients, linear.gradients(u[r], inputs), strict=True):
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


class StubbornNet(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return Stubborn.apply(super().forward(input))


def test_where_it_cannot_each_covector_has_a_pass() -> None:
    torch.manual_seed(0)
    model = StubbornNet(4, 3).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    assert_close(linear.rows(), jacobian(model(x), [*model.parameters()]), 1e-12, "J")
