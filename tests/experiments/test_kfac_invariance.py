"""Luk and Grosse (2018): twins compute the same function; records, claims, figure, resuming."""

import io
import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from pullback.cli.app import app
from pullback.geometry.charts.twin import (
    AffineChange,
    LayerCoordinates,
    change_coordinates,
    draw_change,
    find_whitening,
    make_identity,
    make_twin,
    tanh_twin,
)
from pullback_experiments.framework import executor
from pullback_experiments.kfac_invariance import EXPERIMENTS, Invariance, experiment
from pullback_experiments.kfac_invariance.experiment import RECORDED, claims
from pullback_experiments.kfac_invariance.methods import GROUPS, METHODS, TwinMethod, TwinRun, run
from pullback_experiments.kfac_invariance.nets import EXHIBITS, NETS, Net, TwinPair

PARTED = {"zero padding with a shift", "RNN, a₀ kept"}
UNLIKE = {*PARTED, "RNN, inputs shifted", "Gauss–Newton, output", "softmax, logits"}


def predict_run(net: str, group: str) -> TwinRun:
    """What theory predicts."""
    kfac = group.startswith("K-FAC")
    unlike = net in UNLIKE or group in GROUPS[2:]
    first = 0.5 if net in PARTED else 1e-15
    return TwinRun(
        mismatch=[first, 0.5 if unlike else 1e-13],
        loss=[1.0],
        condition=1e4 if kfac else None,
        notes=["0.weight: its input side is singular"] if net == "dead inputs" else [],
        degenerate=["2.weight: as with softmax logits"] if net == "softmax" else [],
    )


def quiet() -> Console:
    return Console(file=io.StringIO(), width=150)


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.name)
def test_twins_start_as_one_function_with_other_weights(net: Net) -> None:
    pair = net.make(1)
    with torch.no_grad():
        one, two = (side.readout(side.model(pair.probe_inputs)) for side in (pair.one, pair.two))
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)
    for p, q in zip(pair.one.model.parameters(), pair.two.model.parameters(), strict=True):
        assert p.shape == q.shape
        assert not torch.allclose(p, q)


def test_sigmoid_to_tanh_is_the_known_map() -> None:
    """W† = W/4 and b† = (b + ½W1)/2 inside; W/2, b/2 first; W/2, b + ½W1 last."""
    torch.manual_seed(0)
    sizes = ((3, 4), (4, 5), (5, 2))
    one, two, three = (nn.Linear(*s, dtype=torch.float64) for s in sizes)
    model = nn.Sequential(one, nn.Sigmoid(), two, nn.Sigmoid(), three)
    other = tanh_twin(model, make_identity(3))
    assert [type(m) for m in other] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    want = [
        one.weight / 2, one.bias / 2,
        two.weight / 4, (two.bias + two.weight.sum(1) / 2) / 2,
        three.weight / 2, three.bias + three.weight.sum(1) / 2,
    ]  # fmt: skip
    for p, q in zip(other.parameters(), want, strict=True):
        torch.testing.assert_close(p, q)
    x = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(other(x), model(x))


def test_a_changed_convolution_sees_changed_channels() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(2, 3, 3, stride=2).double()
    generator = torch.Generator().manual_seed(1)
    before = draw_change(2, generator)
    after = draw_change(3, generator)
    x = torch.randn(2, 2, 7, 7, dtype=torch.float64)

    def apply_change(change: AffineChange, a: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,njxy->nixy", change.matrix, a) + change.shift[:, None, None]

    actual = apply_change(after, change_coordinates(layer, before, after)(apply_change(before, x)))
    torch.testing.assert_close(actual, layer(x))


def test_whitening_whitens_and_changes_invert() -> None:
    x = torch.randn(300, 3, dtype=torch.float64) @ torch.tensor(
        [[2.0, 0, 0], [1, 1, 0], [3, 0, 1]], dtype=torch.float64
    )
    change = find_whitening(x + 5)
    y = (x + 5) @ change.matrix.T + change.shift
    torch.testing.assert_close(torch.cov(y.T), torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(y.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    back = change.inverse()
    torch.testing.assert_close(y @ back.matrix.T + back.shift, x + 5)


def test_no_change_is_no_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    to = [
        LayerCoordinates(make_identity(2), make_identity(3)),
        LayerCoordinates(make_identity(3), make_identity(1)),
    ]
    assert [type(m) for m in make_twin(model, to)] == [type(m) for m in model]


def test_a_run_measures_before_and_after() -> None:
    record = run(NETS[0].make(0), METHODS[0], 2)
    assert len(record.mismatch) == 3
    assert len(record.loss) == 2
    assert record.worst <= 1e-10
    assert record.condition is not None
    assert 1 < record.condition < 1e6


def test_a_diverged_run_is_no_agreement() -> None:
    pair = NETS[0].make(0)
    with torch.no_grad():
        for p in pair.two.model.parameters():
            p.fill_(math.nan)
    assert (
        run(TwinPair(pair.one, pair.two, pair.batch, pair.probe_inputs), METHODS[-1], 1).worst
        > 1e100
    )


def test_claims_are_as_recorded_when_theory_holds() -> None:
    names = [net.name for net in (*NETS, *EXHIBITS)]
    actual = {key: [predict_run(*key)] for key in product(names, GROUPS)}
    checks = claims(actual)
    assert [c.holds for c in checks] == list(RECORDED)
    actual["tanh MLP", GROUPS[0]] = [TwinRun([0.0, 1e-3], condition=10.0)]
    broken = claims(actual)
    assert not broken[0].holds
    assert "unlike the record" in str(broken[0])
    # a run with unsound factors says nothing
    actual["tanh MLP", GROUPS[0]] = [TwinRun([0.0, 1e-3], condition=1e9)]
    assert claims(actual)[0].holds


@pytest.mark.slow
def test_the_experiment_writes_record_and_figure_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items: list[tuple[Any, str]] = []

    def pretend(net: Any, method: TwinMethod, steps: int) -> TwinRun:
        items.append((net, method.name))
        return predict_run(net, method.group)

    monkeypatch.setattr(experiment, "run", pretend)
    nets = [name_only(net) for net in NETS]
    exhibits = [name_only(net) for net in EXHIBITS]
    ours = Invariance(nets=nets, exhibits=exhibits)
    assert executor.run(ours, False, [0, 1], tmp_path, quiet()).status == 0
    assert len(items) == 2 * (len(NETS) * len(METHODS) + len(EXHIBITS) * 4)
    assert (tmp_path / "luk-grosse-2018.png").read_bytes()[:4] == b"\x89PNG"
    state = json.loads((tmp_path / "luk-grosse-2018.json").read_text("utf-8"))
    assert len(state["summary"]["checks"]) == len(RECORDED)
    assert state["summary"]["verdict"]["outcome"] == "differs"
    assert {"torch", "commit"} <= set(state["environments"][0])
    before = len(items)
    assert executor.run(ours, False, [0, 1], tmp_path, quiet()).status == 0
    assert len(items) == before
    assert executor.run(ours, True, None, tmp_path, quiet()).status == 0
    quick = json.loads((tmp_path / "luk-grosse-2018-quick.json").read_text("utf-8"))
    assert {r["seed"] for r in quick["runs"]} == {0, 1}


def name_only(net: Net) -> Net:
    """The same, whose pair is nothing but its name."""
    return replace(net, make=lambda seed: net.name)  # pyright: ignore[reportArgumentType]


def test_the_command_lists_it() -> None:
    assert [e.name for e in EXPERIMENTS] == ["luk-grosse-2018"]
    outcome = CliRunner().invoke(app, ["list"])
    assert "luk-grosse-2018" in outcome.stdout
