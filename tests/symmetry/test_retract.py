"""Retractions of layers, by numbers that were worked out apart."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor, nn

from pullback.symmetry.slices import EqualNorm

from .chain import mlp, relative, scalings


def scalar_net(weights: list[float], biases: list[float]) -> nn.Sequential:
    model = mlp(*[1] * (len(weights) + 1))
    layers = [m for m in model if isinstance(m, nn.Linear)]
    with torch.no_grad():
        for layer, a, b in zip(layers, weights, biases, strict=True):
            layer.weight.fill_(a)
            layer.bias.fill_(b)
    return model


def values(model: nn.Sequential, parameter_name: str) -> list[float]:
    return [float(getattr(m, parameter_name).item()) for m in model if isinstance(m, nn.Linear)]


def test_two_scalar_layers() -> None:
    model = scalar_net([2, 3], [1, 0.5])
    EqualNorm(scalings(model), model).retract_()
    a = values(model, "weight")
    b = values(model, "bias")
    assert (a[0] ** 2 + b[0] ** 2) ** 0.5 == pytest.approx(2.5900200641, abs=1e-10)
    assert a[1] == pytest.approx((3 * 5**0.5) ** 0.5, rel=1e-14)
    assert b[1] == 0.5


def test_three_scalar_layers() -> None:
    model = scalar_net([1, 2, 4], [2, 1, 0.5])
    x = torch.tensor([[-1.0], [0.3], [2.0]]).double()
    before = model(x)
    EqualNorm(scalings(model), model).retract_()
    expected = [1.234232023, 2.348612479, 2.759826704], [2.468464047, 1.449366366, 0.5]
    assert values(model, "weight") == pytest.approx(expected[0], abs=1e-9)
    assert values(model, "bias") == pytest.approx(expected[1], abs=1e-9)
    assert relative(model(x), before) < 1e-14


def parts(model: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    layers = [m for m in model if isinstance(m, nn.Linear)]
    return [(m.weight.detach().clone(), m.bias.detach().clone()) for m in layers]


def printed_formula(layers: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The paper's (71) and (74) as they stand."""
    primes = []
    product = 1.0
    for a, b in layers[:-1]:
        primes.append(1 / float((a.square().sum() + product**2 * b.square().sum()).sqrt()))
        product *= primes[-1]
    primes.append(1 / float(layers[-1][0].norm()))
    common = prod(primes) ** (-1 / len(primes))
    out = []
    product = 1.0
    for g, (a, b) in zip(primes[:-1], layers[:-1], strict=True):
        product *= g
        out.append((common * g * a, common * product * b))
    return [*out, (common * primes[-1] * layers[-1][0], layers[-1][1])]


def evaluate(layers: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    for a, b in layers[:-1]:
        x = (x @ a.T + b).relu()
    return x @ layers[-1][0].T + layers[-1][1]


def norms(layers: list[tuple[Tensor, Tensor]]) -> list[float]:
    inner = [float((a.square().sum() + b.square().sum()).sqrt()) for a, b in layers[:-1]]
    return [*inner, float(layers[-1][0].norm())]


def test_the_printed_retraction_is_right_for_two_layers_only() -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
    two = parts(mlp(3, 5, 2))
    assert relative(evaluate(printed_formula(two), x), evaluate(two, x)) < 1e-13
    model = mlp(3, 4, 5, 2)
    three = parts(model)
    moved = printed_formula(three)
    assert norms(moved) == pytest.approx([norms(moved)[0]] * 3, rel=1e-13)
    assert relative(evaluate(moved, x), evaluate(three, x)) > 1e-2
    EqualNorm(scalings(model), model).retract_()
    ours = parts(model)
    assert norms(ours) == pytest.approx([norms(ours)[0]] * 3, rel=1e-14)
    assert relative(evaluate(ours, x), evaluate(three, x)) < 1e-13
    assert torch.equal(ours[-1][1], three[-1][1])


def test_without_biases_it_is_the_closed_form() -> None:
    model = mlp(3, 4, 5, 2, bias=False)
    layers = [p.detach().clone() for p in model.parameters()]
    mean = torch.stack([w.norm().log() for w in layers]).mean().exp()
    point = EqualNorm(scalings(model), model).retract()
    for w, actual in zip(layers, point.values(), strict=True):
        assert relative(actual, mean * w / w.norm()) < 1e-14
