"""Single runs for searches: one that fails does not end the others, but shows in the status."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from pullback.cli.app import app
from pullback_experiments.benchmarks import race_probe

OPTIONS = ["bench", "race-probe", "--size", "quick", "--device", "cpu"]


def run_or_fail(task: object, method: str, lr: float, **options: object) -> dict[str, Any]:
    """Return what a run gives; Muon has no memory left."""
    if method == "muon":
        raise MemoryError("none is left")
    return {
        "step": [0, 2], "seconds": [0.0, 0.5], "held-out loss": [5.0, 4.0], "accuracy": [0.0, 0.5],
        "final": 4.0, "ms": 250.0,
    }  # fmt: skip


def test_runs_that_failed_show_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_probe, "run", run_or_fail)
    outcome = CliRunner().invoke(app, [*OPTIONS, "--methods", "muon,adamw", "--seed", "0,1"])
    records = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert [(record["method"], record.get("error")) for record in records] == [
        ("muon", "MemoryError: none is left"),
        ("muon", "MemoryError: none is left"),
        ("adamw", None),
        ("adamw", None),
    ]
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines()[-1] == "2 of 4 runs failed"


def test_without_a_failure_the_status_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_probe, "run", run_or_fail)
    outcome = CliRunner().invoke(app, [*OPTIONS, "--methods", "adamw"])
    assert outcome.exit_code == 0
    assert "failed" not in outcome.stderr
