"""Layers that people train beside a frozen one: what has a block, and that nothing is unnamed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pullback as pb


class Adapter(nn.Module):
    """A frozen linear layer with trained parameters beside it."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.base = nn.Linear(8, 6).requires_grad_(False)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / 4))


class Scaled(Adapter):
    """IA³."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.gain


class Hadamard(Adapter):
    """LoHa."""

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.a @ self.b) * (self.c @ self.d)
        return self.base(x) + F.linear(x, weight)


class KroneckerProduct(Adapter):
    """LoKr."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(x, torch.kron(self.a, self.b))


class Ensemble(Adapter):
    """Three layers at once by `vmap`."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.vmap(F.linear, in_dims=(None, 0, 0))(x, self.weight, self.bias)
        return self.base(x) + outputs.mean(0)


class Square(nn.Module):
    """A bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(8, 8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.tanh())


LAYERS = {
    "IA3": (lambda: Scaled(gain=(6,)), "units"),
    "LoHa": (lambda: Hadamard(a=(6, 2), b=(2, 8), c=(6, 2), d=(2, 8)), "diagonal"),
    "LoKr": (lambda: KroneckerProduct(a=(2, 2), b=(3, 4)), "diagonal"),
    "vmap": (lambda: Ensemble(weight=(3, 6, 8), bias=(3, 6)), "diagonal"),
    "bilinear": (Square, "kronecker"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rule", ["natural", "eigenbasis"])
def test_every_trained_parameter_has_a_block_or_a_named_rule(name: str, rule: str) -> None:
    torch.manual_seed(0)
    make, block = LAYERS[name]
    model = nn.Sequential(make(), nn.Tanh(), nn.Linear(6, 4))
    optimizer = pb.KFAC(model, rule=rule)
    x = torch.randn(40, 8)
    y = torch.randint(0, 4, (40,))
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach(), old) != p.requires_grad
    for row in optimizer.coverage():
        assert row.reason
        if row.rule == "natural" and row.name.startswith("0."):
            assert row.block.startswith(block)
        assert row.rule in (rule, "adam", "none")
