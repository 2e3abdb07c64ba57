"""The K-FAC benchmarks run at tiny sizes, and their peer computes what it says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pullback_experiments.benchmarks import (
    eigenbasis_cost,
    journey,
    kfac,
    kfac_floor,
    kfac_parts,
    kfac_versions,
)
from pullback_experiments.benchmarks.naive_kfac import NaiveKFAC


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_costs_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    kfac.main(["--quick", "--only", "autoencoder"])
    assert "10/100, run" in capsys.readouterr().out


def test_two_versions_are_measured_alike() -> None:
    """The function runs in processes of either tree: it needs no names but those of both."""
    times = kfac_versions.measure("autoencoder", torch.device("cpu"), 1, quick=True)
    ratios = kfac_versions.ratios(times)
    assert {"plain", "statistics", "10/100", kfac_versions.SPECTRAL} <= ratios.keys()


def test_parts_are_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--quick", "--repeats", "1", "--only", "autoencoder"]
    kfac_parts.main(options)
    assert "without float16 inverses" in capsys.readouterr().out


def test_rotations_are_what_a_plain_step_adds_to_sgd() -> None:
    widths = (12, 8, 4)
    costs = eigenbasis_cost.count_costs(widths, 32)
    extra = costs["plain"].flops - costs["SGD"].flops
    assert extra == pytest.approx(eigenbasis_cost.count_rotations(widths))
    assert costs["refresh"].flops > costs["plain"].flops


def test_schedules_are_weighted_means_of_the_kinds_of_steps() -> None:
    types = {"baseline": 1.0, "kfac plain": 2.0, "kfac statistics": 4.0, "kfac inversion": 10.0}
    assert kfac.predict_schedule_ratio(types, "kfac", (1, 1)) == pytest.approx(10.0)
    assert kfac.predict_schedule_ratio(types, "kfac", (2, 6)) == pytest.approx(2.0 + 1.0 + 1.0)


def test_the_floor_counts_a_linear_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    floor = kfac_floor.floor(model, lambda: model(x), lambda z: z.sum())
    assert floor.gradient == 2 * 5 * (2 * 12 + 3 * 8)  # no gradient for the first input
    assert floor.reverse == 2 * 5 * 8
    assert floor.products == 5 * (9 + 16 + 16 + 4)
    assert floor.inverses == 4**3 + 4**3 + 5**3 + 2**3
    assert floor.apply == 2 * 16 * 8 + 2 * 10 * 7


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_naive_peer_divides_by_both_factors() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(20, 3).double()
    y = torch.randn(20, 2).double()
    before = torch.cat([model.weight, model.bias[:, None]], 1).detach().clone()
    optimizer = NaiveKFAC(model, 1.0, damping=0.0, momentum=0.0)
    (0.5 * (model(x) - y).square().sum() / 20).backward()
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    g = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1).clone()
    delta = (model(x) - y).detach()
    a = torch.cat([x, torch.ones(20, 1).double()], 1)
    optimizer.step()
    after = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    want = torch.linalg.solve(delta.T @ delta / 20, g) @ torch.linalg.inv(a.T @ a / 20)
    torch.testing.assert_close(before - after, want)


def test_steps_take_a_reader_through_few_files() -> None:
    """Files and moves between them: at most these, which a change should not raise unnoticed."""
    statistics = journey.follow_kfac(statistics_every=1)
    plain = journey.follow_kfac(statistics_every=100)
    natural_gradient = journey.follow_natural_gradient()
    assert len(statistics.files) <= 45
    assert statistics.moves <= 219
    assert len(plain.files) <= 21
    assert plain.moves <= 62
    assert len(natural_gradient.files) <= 31
    assert natural_gradient.moves <= 157
