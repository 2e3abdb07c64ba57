"""Layers that people train beside a frozen one: what has a block, and that nothing is unnamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


class Rotated(Adapter):
    """OFT: the inputs are turned by the Cayley transform of a skew matrix."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = torch.triu_indices(8, 8, 1)
        upper = torch.zeros(8, 8).index_put((rows, columns), self.angles)
        skew = upper - upper.T
        return self.base(torch.linalg.solve(torch.eye(8) + skew, (x - x @ skew).T).T)


class Quantized(Adapter):
    """A weight of eight levels, with a straight-through gradient."""

    def forward(self, x: Tensor) -> Tensor:
        step = self.weight.detach().abs().max() / 4
        rounded = self.weight + ((self.weight / step).round() * step - self.weight).detach()
        return self.base(x) + F.linear(x, rounded)


class Fourier(Adapter):
    """A Fourier layer: a product with complex weights, one per frequency."""

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * torch.view_as_complex(self.weight)
        return self.base(torch.fft.irfft(spectrum, n=8))


class EulerAdjoint(torch.autograd.Function):
    """y + Δt·tanh(yWᵀ), whose gradient is computed by hand, as those of adjoint ODEs are."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, weight)
        return y + 0.25 * torch.tanh(y @ weight.T)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, weight = ctx.saved_tensors
        slope = 0.25 * cotangent * (1 - torch.tanh(y @ weight.T).square())
        return cotangent + slope @ weight, slope.T @ y


class Adjoint(Adapter):
    """A layer inside of a custom function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.base(EulerAdjoint.apply(x, self.weight))


def make_spectral_norm() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6, bias=False))


@dataclass(frozen=True)
class Expected:
    """What `coverage()` says of a layer's trained parameters under the natural rule."""

    make: Callable[[], nn.Module]
    block: str
    reason: str


LAYERS = {
    "IA3": Expected(lambda: Scaled(gain=(6,)), "units", "elementwise product"),
    "LoHa": Expected(
        lambda: Hadamard(a=(6, 2), b=(2, 8), c=(6, 2), d=(2, 8)), "diagonal", "computed from it"
    ),
    "LoKr": Expected(lambda: KroneckerProduct(a=(2, 2), b=(3, 4)), "diagonal", "computed from it"),
    "OFT": Expected(lambda: Rotated(angles=(28,)), "diagonal", "it enters index_put"),
    "vmap": Expected(
        lambda: Ensemble(weight=(3, 6, 8), bias=(3, 6)), "diagonal", "inside torch.vmap"
    ),
    "bilinear": Expected(Square, "kronecker", "product of matrices"),
    "spectral norm": Expected(make_spectral_norm, "diagonal", "SpectralNorm"),
    "quantized": Expected(lambda: Quantized(weight=(6, 8)), "diagonal", "computed from it"),
    "Fourier": Expected(lambda: Fourier(weight=(5, 2)), "diagonal", "complex numbers"),
    "adjoint": Expected(
        lambda: Adjoint(weight=(8, 8)), "diagonal", "the custom function EulerAdjoint"
    ),
}


@pytest.mark.filterwarnings("ignore")
def test_reasons_after_loading_promise_only_what_statistics_will_show() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make_spectral_norm(), nn.Tanh(), nn.Linear(6, 4))
    x = torch.randn(40, 8)
    y = torch.randint(0, 4, (40,))

    def step(optimizer: pb.KFAC) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    first = pb.KFAC(model, rule="eigenbasis", statistics_every=1)
    step(first)
    second = pb.KFAC(model, rule="eigenbasis", statistics_every=1)
    second.load_state_dict(first.state_dict())
    loaded = {row.name: row.reason for row in second.coverage()}
    promise = "; the next statistics show how it is used"
    assert loaded["2.bias"] == "vector by the saved table"
    assert loaded["2.weight"] == f"head by the saved table{promise}"
    assert loaded["0.parametrizations.weight.original"] == f"matrix by the saved table{promise}"
    step(second)
    assert not [row.name for row in second.coverage() if promise in row.reason]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rule", ["natural", "eigenbasis"])
def test_every_trained_parameter_has_a_block_or_a_true_reason(name: str, rule: str) -> None:
    torch.manual_seed(0)
    expected = LAYERS[name]
    model = nn.Sequential(expected.make(), nn.Tanh(), nn.Linear(6, 4))
    optimizer = pb.KFAC(model, rule=rule)
    x = torch.randn(40, 8)
    y = torch.randint(0, 4, (40,))
    roles = {row.name: row for row in pb.parameter_roles(model, x)}
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach(), old) != p.requires_grad
    for row in optimizer.coverage():
        assert row.rule in (rule, "adam", "none")
        if rule == "eigenbasis" and row.rule != "none":
            assert roles[row.name].rule == row.rule
        if not row.name.startswith("0.") or row.rule == "none":
            continue
        if row.rule == "natural":
            assert row.block.startswith(expected.block)
        if row.rule == "natural" or expected.block == "diagonal":
            assert expected.reason in row.reason
