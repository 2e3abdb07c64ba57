"""Every experiment from beginning to end in seconds: run, record, resume, draw, report."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pullback.cli.app import app
from pullback_experiments import Experiment, Results, registry
from pullback_experiments.framework import executor
from pullback_experiments.framework.check import Check, Outcome

from .small import quiet

#: whose code others run too, on smaller networks
SLOW = {
    "bai-2024-sobolev-cifar10",
    "bai-2024-sobolev-cifar100",
    "bai-2024-slices-figure2",
    "kfac-convnet",
    "kfac-vgg",
    "kerekes-2022-figure3",
    "kerekes-2022-figure6",
    "race-text-large",
    "race-text-largest",
    "race-text-short",
    "yin-2024-deep",
    "yin-2024-poisson",
    "kfac-shakespeare",
    "bai-2024-slices-rescaled",
    "bai-2024-sobolev-digits",
    "kfac-autoencoder",
    "kerekes-2022-figure4",
    "luk-grosse-2018",
    "kerekes-2022-figure2",
    "kerekes-2022-figure5",
    "race-text",
    "invariance-audit",
    "yin-2024-shallow",
    "bai-2024-projection",
    "van-oostrum-2023-examples",
    "kerekes-2022-support",
    "pde-benchmarks",
    "demo",
    "race-images",
    "kerekes-2022-theorems",
    "influence-cifar",
    "influence-mnist",
    "influence-scale",
    "influence-text",
    "laplace-rotation",
    "pde-honesty",
    "pde-quasi-newton",
    "pde-stuck",
    "pde-unseen-seeds",
    "vision-recipe",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in registry.names()],
)
def test_smoke(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PULLBACK_DATA", raising=False)  # no data but what is installed or made up
    monkeypatch.chdir(tmp_path)
    ours = registry.find(name).smoke()
    outcome = executor.run(ours, True, out=tmp_path, console=quiet())
    assert outcome.finished == outcome.total > 0
    assert outcome.seeds == tuple(ours.quick_seeds)
    assert_judged(ours, outcome)
    record = json.loads((tmp_path / f"{name}-quick.json").read_text("utf-8"))
    assert record["about"]["name"] == name
    assert record["summary"]["items"] == [outcome.total, outcome.total]
    assert len(record["runs"]) == outcome.total
    pictures = [p for p in outcome.files if p.suffix == ".png"]
    assert pictures or name in NOT_DRAWN
    assert_drawn(pictures, outcome)

    store = ours.open_store(True, tmp_path)  # the same configuration: nothing would be done again
    assert len(store) == outcome.total
    if ours.judged:
        assert tuple(ours.judge(Results(store, outcome.seeds, True))) == outcome.checks

    answer = CliRunner().invoke(app, ["report", "--out", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    page = (tmp_path / "report.html").read_text("utf-8")
    assert f"{name}-quick" in page
    assert not pictures or "<img" in page


def assert_judged(experiment: Experiment, outcome: Outcome) -> None:
    """All checks agree with what is recorded; sizes that are too small have no checks."""
    assert outcome.status == 0, [str(c) for c in outcome.checks if not c.agrees]
    assert experiment.judged or not outcome.checks
    assert (outcome.verdict is None) == (not any(c.of_paper for c in outcome.checks))
    assert all(isinstance(check, Check) for check in outcome.checks)


def assert_drawn(pictures: list[Path], outcome: Outcome) -> None:
    """Every picture is a PNG file with an SVG file beside it."""
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in pictures)
    assert {p.with_suffix(".svg") for p in pictures} <= set(outcome.files)


#: experiments whose theorems are numbers alone
NOT_DRAWN = {
    "influence-scale",
    "kerekes-2022-theorems",
    "laplace-rotation",
    "laplace-uci",
    "pde-honesty",
    "pde-quasi-newton",
    "pde-stuck",
    "pde-unseen-seeds",
    "vision-recipe",
    "vmc-spins",
}

#: experiments whose quick version judges nothing, and says so
TOO_SHORT = {
    "bai-2024-sobolev-cifar10",
    "bai-2024-sobolev-cifar100",
    "demo",
    "influence-cifar",
    "influence-mnist",
    "influence-scale",
    "influence-text",
    "kerekes-2022-figure4",
    "kerekes-2022-figure5",
    "kerekes-2022-figure6",
    "kfac-convnet",
    "kfac-shakespeare",
    "kfac-vgg",
    "race-text",
    "race-text-large",
    "race-text-largest",
    "race-text-short",
    "race-images",
    "vision-recipe",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_quick(name: str, tmp_path: Path) -> None:
    """Two minutes of two cores at most, and all checks as recorded; where there are the data."""
    if "cifar10" in name:
        pytest.importorskip("PIL")
        from pullback_experiments.learning.data import available

        file = "cifar100.npz" if "cifar100" in name else "cifar10_test.npz"
        if not available(file):
            pytest.skip(f"PULLBACK_DATA names no folder with {file}")
    outcome = executor.run(registry.find(name), True, out=tmp_path)
    assert outcome.status == 0, [str(c) for c in outcome.checks if not c.agrees]
    assert outcome.checks or name in TOO_SHORT
