"""Ready problems by defaults: every one is among them, and a run says what it found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pullback import pde
from pullback.pde.judgement.stop import Stop, StopReason
from pullback.pde.judgement.verdict import PDEVerdict, find_exact_level
from pullback_experiments.benchmarks import pde_defaults
from pullback_experiments.problems import SETUPS
from pullback_experiments.tables.numbers import record

DOUBLE = torch.float64


def find_smallest_errors() -> dict[str, float]:
    """The smallest error on record by set-up."""
    runs = [*record("pde-cuda")["runs"].values(), *record("pde-seeds")["runs"].values()]
    errors: dict[str, float] = {}
    for one in runs:
        errors[one["name"]] = min(one["error"], errors.get(one["name"], math.inf))
    return errors


def test_every_ready_problem_is_there() -> None:
    assert set(pde_defaults.PROBLEMS) == set(SETUPS)
    assert not any(make().hard for make in pde_defaults.PROBLEMS.values())


def test_no_answer_on_record_would_be_far_off_in_silence() -> None:
    """Beyond 100 times the tuned error there is a warning, unless residuals are exact."""
    best = find_smallest_errors()
    for name in ("pde-defaults", "pde-seeds"):
        for one in record(name)["runs"].values():
            limit = find_exact_level(
                torch.finfo(torch.float32 if "single" in one["name"] else DOUBLE).eps
            )
            numbers = one["own"], one["fresh"], one["relative"]
            verdict = PDEVerdict(Stop(StopReason.ALL_STEPS), False, *numbers, exact=limit)
            if one["error"] > 100 * best.get(one["name"], math.inf):
                assert verdict.alarming or one["relative"] <= 1e-8, one["name"]
            if one["relative"] <= 1e-8:
                assert not verdict.alarming, one["name"]


def test_a_run_says_what_it_found() -> None:
    options = {"steps": 3, "points": 64}
    actual = pde_defaults.run_once("poisson2d", 0, 1, False, True, [4, 4], options)
    assert actual["parameters"] == 37
    assert actual["steps"] == 3
    assert actual["verdict"] == "unfinished"
    assert any("unfinished" in text for text in actual["warnings"])
    assert actual["weights"]["dirichlet"] > 1
    assert "true error" in actual["check"]
    assert json.loads(json.dumps(actual))["error"] == actual["error"]
    assert "poisson2d" in pde_defaults.line(actual)


def test_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "found.json"
    calls = []

    def one(arguments: tuple[Any, ...]) -> dict[str, object]:
        calls.append(arguments[:2])
        if arguments[1] == 1:
            return {"name": arguments[0], "seed": 1, "failed": "killed"}
        return pde_defaults.run_once(*arguments)

    monkeypatch.setattr(pde_defaults, "run_in_process", one)
    arguments = ["--problems", "ritz", "--seeds", "0-1", "--threads", "1"]
    arguments += ["--options", '{"steps": 1, "points": 20}', "--hidden", "3", "--out", str(path)]
    pde_defaults.main(arguments)
    assert list(json.loads(path.read_text())["runs"]) == ["ritz/0"]
    pde_defaults.main(arguments)
    assert calls == [("ritz", 0), ("ritz", 1), ("ritz", 1)]


def test_networks_of_many_dimensions_stay_small() -> None:
    sizes = {
        d: sum(p.numel() for p in pde.network_for(pde.Poisson(d)).parameters()) for d in (10, 100)
    }
    assert sizes[10] == 769
    assert sizes[100] <= 1100
