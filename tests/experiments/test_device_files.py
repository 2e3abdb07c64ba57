"""Records from the files that parts on a GPU leave."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pullback import PullbackError
from pullback_experiments import registry
from pullback_experiments.curvature.device.images import name_rounds
from pullback_experiments.curvature.influence import device_files
from pullback_experiments.curvature.retraining.halves import MULTIPLES, name_relative
from pullback_experiments.curvature.sizes import FULL
from pullback_experiments.framework import executor

TIMED = {"fit": {"seconds": 2.0, "gigabytes": 1.0}, "score": {"seconds": 1.0, "gigabytes": 3.0}}


def write_parts(folder: Path, parts: dict[str, Any], **sizes: int) -> None:
    environment = {"device": "a GPU", "torch": "2", "sizes": {**asdict(FULL), **sizes}}
    (folder / "curvature.json").write_text(json.dumps({**parts, "environment": environment}))


def make_cifar_parts(rounds: int) -> dict[str, Any]:
    numbers = {"EK-FAC": 0.4, "gradient dot product": 0.1, "reliability": 0.9}
    cifar: dict[str, Any] = {name_rounds(count): numbers for count in range(1, rounds + 1)}
    cifar["pilot maximum pooling, 4 epochs"] = {"accuracy": 0.7, "accuracy on training data": 0.9}
    cifar.update(recipe="maximum pooling, 4 epochs", damping="relative 0.001", seconds=9.0)
    dampings = {name_relative(multiple): 0.3 for multiple in MULTIPLES}
    trak = {f"TRAK, {count} models": {"score": 0.2, "seconds": 1.0} for count in (1, 10)}
    return {
        "cifar2": cifar,
        "dampings": {**dampings, "seconds": 1.0},
        "trak": {**trak, "seconds": 1.0},
    }


def test_parts_become_a_record_that_is_judged(tmp_path: Path) -> None:
    write_parts(tmp_path, make_cifar_parts(24))
    named = [f"{part}={tmp_path}" for part in ("cifar2", "dampings", "trak")]
    device_files.main([*named, "--out", str(tmp_path), "--commit", "abc"])
    outcome = executor.run(registry.find("influence-cifar"), out=tmp_path)
    assert outcome.finished == outcome.total == 1
    assert [check.holds for check in outcome.checks] == [True, True]
    record = json.loads((tmp_path / "influence-cifar.json").read_text("utf-8"))
    assert record["environments"][0]["device"] == "a GPU"
    assert record["environments"][0]["commit"] == "abc"
    scores = record["runs"][0]["record"]["scores"]
    assert scores["EK-FAC"] == 0.4
    assert scores["EK-FAC, default damping"] == 0.3
    assert scores["TRAK, 1 model"] == 0.2


def test_items_of_one_experiment_may_come_one_by_one(tmp_path: Path) -> None:
    rows = [{"samples": n, "parameters": 7, "queries": 2, **TIMED} for n in (10, 20)]
    write_parts(tmp_path, {"growth": {"rows": rows, "seconds": 3.0}})
    device_files.main([f"growth={tmp_path}", "--out", str(tmp_path)])
    decoder = {"1000 sequences": TIMED, "parameters": 7, "seconds": 3.0}
    write_parts(tmp_path, {"gpt2": decoder})
    device_files.main([f"gpt2={tmp_path}", "--out", str(tmp_path)])
    record = json.loads((tmp_path / "influence-scale.json").read_text("utf-8"))
    assert [run["key"] for run in record["runs"]] == [["growth"], ["gpt2"]]


def test_a_part_of_other_sizes_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path, {"growth": {"rows": [], "seconds": 3.0}}, samples=5)
    with pytest.raises(PullbackError, match="samples was 5 instead of"):
        device_files.main([f"growth={tmp_path}", "--out", str(tmp_path)])


def test_a_folder_without_the_part_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path, {})
    with pytest.raises(PullbackError, match="no numbers of growth"):
        device_files.main([f"growth={tmp_path}", "--out", str(tmp_path)])
