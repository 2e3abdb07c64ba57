"""The benchmark of slices measures what it says, at tiny sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pullback.symmetry import find
from pullback_experiments.benchmarks import slices
from pullback_experiments.benchmarks.slices_routes import (
    Bench,
    Counter,
    mlp_scalings,
    relu_mlp,
    resnet_scalings,
)

CPU = torch.device("cpu")


@pytest.mark.slow
def test_costs_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    slices.main(["--quick", "--only", "mlp", "--rounds", "3"])
    out = capsys.readouterr().out
    assert "eager training step: 3 rounds" in out
    assert "layers, polar" in out
    assert "captured" not in out  # there are no graphs on a CPU


def test_ratios_are_those_of_a_round() -> None:
    """A machine that slows down by ten in some rounds changes no ratio."""
    speed = [1.0, 10.0, 1.0, 10.0, 10.0]
    times = {"SGD foreach": [2 * s for s in speed], "SGD fused": [3 * s for s in speed]}
    times |= {"units": [2.1 * s for s in speed], "SGD again": [3 * s for s in speed]}
    ratios = slices.ratios(times)
    assert set(ratios) == {"units", "SGD again"}
    assert ratios["units"]["low"] == pytest.approx(1.05)
    assert ratios["units"]["high"] == pytest.approx(1.05)
    assert ratios["SGD again"]["ratio"] == pytest.approx(1.0)  # of its twin, not of the faster one


def test_medians_have_intervals() -> None:
    middle = slices.summarize_ratios([float(i) for i in range(101)])
    assert middle["ratio"] == 50
    assert (middle["low"], middle["high"]) == (40, 60)
    assert (middle["quartile_1"], middle["quartile_3"]) == (25, 75)
    assert slices.summarize_ratios([2.0])["low"] == 2.0


def test_routes_take_turns_until_the_time_is_up() -> None:
    calls: list[str] = []
    blocks = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = slices.in_rounds(blocks, CPU, rounds=50, seconds=0.0)
    assert [len(t) for t in times.values()] == [3, 3, 3]
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)


@pytest.mark.parametrize("fused", [False, True])
def test_plain_sgd_is_three_passes(fused: bool) -> None:
    model = nn.Linear(5, 7)
    model(torch.randn(2, 5)).sum().backward()
    opt = torch.optim.SGD(model.parameters(), 0.1, fused=fused, foreach=not fused)
    with Counter() as counted:
        opt.step()
    assert counted.operations == 1
    assert counted.bytes == 3 * 4 * 42


def test_the_listed_scalings_are_the_ones_that_are_found() -> None:
    model = relu_mlp((6, 5, 4, 3))
    units = [s.units for s in mlp_scalings(model)]
    assert units == [s.units for s in find(model, torch.randn(2, 6)).scalings]


def test_the_scalings_of_a_residual_network_keep_its_function() -> None:
    bench = Bench("resnet50", CPU, quick=True)
    model = bench.model.double().eval()
    params = dict(bench.model.named_parameters())
    x = bench.x.double()
    before = model(x)
    with torch.no_grad():
        for s in resnet_scalings(model):
            for name, value in s.act(params, torch.randn(s.units).double()).items():
                params[name].copy_(value)
    assert torch.allclose(model(x), before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("network", "route", "operations", "passes"),
    [
        ("mlp", "units", 30, 6.5),
        ("mlp", "units, every 10", 4, 3.5),
        ("mlp", "layers", 75, 12.5),
        ("mlp", "SGD on layers, every 10", 5, 3.5),
        ("mlp", "layers, polar", 80, 45),
        ("bare", "layers", 27, 6.5),
        ("bare", "layers, every 10", 4, 3.5),
        ("resnet50", "units, every 10", 20, 4.0),
    ],
)
def test_steps_cost_no_more_than_this(
    network: str, route: str, operations: int, passes: float
) -> None:
    bench = Bench(network, CPU, quick=True)
    size = sum(4 * p.numel() for p in bench.model.parameters())
    actual = bench.route(route)
    assert actual.operations <= operations
    assert actual.bytes <= passes * size
