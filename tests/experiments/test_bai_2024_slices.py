"""The slice experiments: starts, methods and checks against what they must be, and short runs."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from pullback import PullbackError
from pullback.symmetry import Sliced
from pullback_experiments.bai_2024_slices import (
    EXPERIMENTS,
    Figure2,
    Rescaling,
    figure2,
    networks,
    rescaled,
)
from pullback_experiments.bai_2024_slices.checks import claims, final, seconds, seconds_per_epoch
from pullback_experiments.bai_2024_slices.law import law
from pullback_experiments.bai_2024_slices.methods import METHODS, START, UNITS
from pullback_experiments.bai_2024_slices.networks import (
    PAPER_WIDTHS,
    convnet,
    digits,
    load,
    mlp,
)
from pullback_experiments.bai_2024_slices.rescaled import METHODS as CONTENDERS
from pullback_experiments.bai_2024_slices.rescaled import measure_difference
from pullback_experiments.framework import executor
from pullback_experiments.framework.experiment import Context
from pullback_experiments.framework.store import Available

CPU = torch.device("cpu")
BY_NAME = {m.name: m for m in METHODS}


def quiet() -> Console:
    return Console(file=io.StringIO())


def context(seed: int = 0) -> Context:
    return Context(seed, CPU, True, Path("nowhere"), None)  # pyright: ignore[reportArgumentType]


def batch() -> tuple[Tensor, Tensor]:
    images = digits(torch.float64)
    return images.x[:32], images.y[:32]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> Tensor:
    x, y = batch()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model(x).detach()


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(64, 12, 9, 10).double()


def test_the_papers_network() -> None:
    model = mlp(*PAPER_WIDTHS[-3:])
    assert [tuple(p.shape) for p in model.parameters()] == [(444, 882), (10, 444)]
    assert PAPER_WIDTHS == (3072, 2634, 2196, 1758, 1320, 882, 444, 10)
    full = EXPERIMENTS[0].config(False)
    assert (full["batch"], full["epochs"], full["lr"]) == (128, 200, 0.01)
    assert [len(e.seeds) for e in EXPERIMENTS] == [5, 3]


@pytest.mark.parametrize("name", list(BY_NAME))
def test_every_method_lowers_the_loss(name: str) -> None:
    model = small()
    x, y = batch()
    optimizer = BY_NAME[name].build(model, 1e-3 if BY_NAME[name].rates else 0.1)
    before = float(F.cross_entropy(model(x), y).detach())
    train(model, optimizer, 10)
    assert float(F.cross_entropy(model(x), y).detach()) < before


def test_the_control_starts_with_equal_norms_and_the_same_function() -> None:
    model = small()
    x, _ = batch()
    before = model(x).detach()
    BY_NAME[START].build(model, 0.1)
    norms = torch.stack([p.detach().norm() for p in model.parameters()])
    torch.testing.assert_close(norms, norms.mean().expand(3))
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-12, atol=1e-14)


def test_units_are_sliced_sgd() -> None:
    one = small()
    two = small()
    a = train(one, BY_NAME[UNITS].build(one, 0.1))
    b = train(two, Sliced(torch.optim.SGD(two.parameters(), 0.1), two, sweeps=1))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_law() -> None:
    actual = law(context(), (64, 10, 8, 10), 16)
    assert actual["one step"] < 1e-12
    assert actual["two steps"][-1] < actual["two steps"][0] < 1e-2
    assert actual["slope"] == pytest.approx(2, abs=0.3)


# --- checks of Figure 2 ----------------------------------------------------------------------


def run(times: float, accuracies: list[float], lost: bool = False) -> dict[str, Any]:
    n = len(accuracies)
    loss = [1.0] * (n - 1) + [math.nan if lost else 1.0]
    return {
        "rate": 0.1,
        "epoch": list(range(n)),
        "seconds": [times * i for i in range(n)],
        "test accuracy": accuracies,
        "train loss": loss,
    }


def test_times_and_ends() -> None:
    runs = [run(2.0, [0.1, 0.5, 0.9, 0.9]), run(3.0, [0.1, 0.5, 0.9, 0.9])]
    assert seconds_per_epoch(runs) == 2.0
    assert seconds(runs, 0.7) == pytest.approx(3.75)
    assert seconds(runs, 0.95) == math.inf
    assert final(runs)[0] == pytest.approx(0.7)
    assert final([run(1.0, [0.1, 0.9], lost=True)]) == (0.1, 0.0)
    assert seconds_per_epoch([run(1.0, [0.1])]) == 0.0


def test_claims_are_decided_by_the_numbers() -> None:
    slow = [run(1.0, [0.1, 0.2, 0.3, 0.9])] * 2
    fast = [run(1.02, [0.1, 0.8, 0.9, 0.9])] * 2
    actual = {m.name: fast for m in METHODS} | {"SGD": slow}
    good = {"one step": 1e-15, "two steps": [4e-3, 1e-3], "slope": 2.0}
    checks = claims(actual, good, 0.6, (True,) * 10)
    assert [c.holds for c in checks] == [True] * 6 + [False] * 4
    assert sum(c.of_paper for c in checks) == 4
    swapped = {m.name: slow for m in METHODS} | {"SGD": fast}
    bad = {**good, "one step": 1e-3}
    checks = claims(swapped, bad, 0.6, (True,) * 10)
    assert [c.holds for c in checks[:2]] == [False, False]
    assert not checks[5].holds


def test_held_out_images_are_not_trained_on() -> None:
    images = digits()
    held_out = figure2._held_out(images)
    assert len(held_out.x) + len(held_out.test_x) == len(images.x)
    assert torch.equal(held_out.test_x[-1], images.x[-1])


# --- rescaled starts -------------------------------------------------------------------------


@pytest.mark.parametrize("network", list(networks.NETWORKS))
@pytest.mark.parametrize("trained", [False, True])
def test_a_start_is_the_same_function_elsewhere(network: str, trained: bool) -> None:
    x, _ = batch()
    plain, _, none = networks.start(network, trained, 0, 1, CPU)
    model, symmetry, moved = networks.start(network, trained, 3, 1, CPU)
    assert none == 0.0
    assert moved < 1e-10
    torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=1e-10)
    first = next(model.parameters()) / next(plain.parameters())
    assert {round(v) for v in first.detach().flatten().log10().tolist()} == {-3, 3}
    assert symmetry.dimension == (96 if network == "MLP" else 24)


@pytest.mark.parametrize("method", [m for m in CONTENDERS if m.sliced], ids=lambda m: m.name)
def test_sliced_optimizers_forget_the_scale(method: Any) -> None:
    ends = []
    for size in (0, 3):
        model, symmetry, _ = networks.start("conv net", False, size, 0, CPU)
        ends.append(train(model, method.build(model, symmetry, 0.01, 0)))
    torch.testing.assert_close(*ends, rtol=1e-8, atol=1e-9)


def test_apart() -> None:
    one = {"train loss": [1.0, 2.0]}
    two = {"train loss": [1.0, 2.5]}
    assert measure_difference(one, two) == pytest.approx(0.2)
    assert measure_difference(one, {"train loss": [1.0]}) == math.inf


# --- whole runs ------------------------------------------------------------------------------


@pytest.mark.slow
def test_rescaled_quick_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [m for m in CONTENDERS if m.name in ("SGD", "SliceSGD")]
    monkeypatch.setattr(rescaled, "METHODS", tuple(methods))
    monkeypatch.setattr("pullback_experiments.bai_2024_slices.rescaled.METHODS", methods)
    (full,) = (e for e in EXPERIMENTS if isinstance(e, Rescaling))
    experiment = replace(full, epochs=2, judged=False)
    assert executor.run(experiment, True, [0], tmp_path, quiet(), seconds=0).status == 3
    assert executor.run(experiment, True, [0], tmp_path, quiet()).status == 0
    path = tmp_path / "bai-2024-slices-rescaled-quick.json"
    before = json.loads(path.read_text())
    assert len(before["runs"]) == 2 + 2 * 2
    assert (tmp_path / "bai-2024-slices-rescaled-quick.png").stat().st_size > 10_000
    assert executor.run(experiment, True, [0], tmp_path, quiet()).status == 0
    assert json.loads(path.read_text()) == before


class _Short(Figure2):
    """Two epochs of a smaller network, with a search."""

    def config(self, quick: bool) -> dict[str, Any]:
        return super().config(True) | {"epochs": 2, "widths": [64, 12, 8, 10], "batch": 256}


@pytest.mark.slow
def test_figure2_searches_trains_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = tuple(replace(m, rates=m.rates[:1]) for m in METHODS)
    monkeypatch.setattr(figure2, "METHODS", cheap)
    monkeypatch.setattr(
        figure2, "law", lambda context: {"one step": 0.0, "two steps": [1e-3], "slope": 2.0}
    )
    expected_checks = (True,) * 10
    short = _Short(
        name="short",
        figure="",
        claim="",
        expected_outcomes=expected_checks,
        quick_expected_outcomes=expected_checks,
        searched=1,
        lr=0.1,
    )
    outcome = executor.run(short, False, [0, 1], tmp_path, quiet())
    assert len(outcome.checks) == 10
    state = json.loads((tmp_path / "short.json").read_text())
    assert ["search", "Adam", "0.0001"] in [r["key"] for r in state["runs"]]
    assert (tmp_path / "short.png").stat().st_size > 10_000
    rows = state["summary"]["tables"][0]["rows"]
    assert [r[0] for r in rows] == [m.name for m in METHODS]
    assert next(r for r in rows if r[0] == "Adam")[1] == "0.0001"


def test_seconds_of_the_full_version_are_those_of_steps_alone(tmp_path: Path) -> None:
    short = _Short(
        name="short", figure="", claim="", expected_outcomes=(), quick_expected_outcomes=()
    )
    store = short.open_store(False, tmp_path)
    record = {"step": [0, 5, 10], "seconds": [0.0, 7.0, 9.0]}
    store.put((("SGD",), 0), record, 1.0, {})
    assert short._group_records(Available(store, False))["SGD"] == [record]
    store.put((("cost", "SGD"), None), {"seconds of a step": 0.1}, 1.0, {})
    assert short._group_records(Available(store, False))["SGD"][0]["seconds"] == [0.0, 0.5, 1.0]


def test_networks_take_images() -> None:
    x = torch.zeros(2, 1, 8, 8)
    assert convnet(4)(x).shape == mlp(64, 5, 10, bias=True)(x).shape == (2, 10)


def test_missing_data_are_noticed_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path))
    load.cache_clear()
    (experiment,) = (e for e in EXPERIMENTS if isinstance(e, Figure2))
    with pytest.raises(PullbackError, match="Set PULLBACK_DATA"):
        executor.run(experiment, out=tmp_path / "out", console=quiet())
    assert not list((tmp_path / "out").iterdir())
