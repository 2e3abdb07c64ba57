"""One way to run a benchmark and to record it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pullback.cli.app import app
from pullback_experiments.framework.benchmark import Record
from pullback_experiments.registry import list_benchmarks

#: benchmarks that import packages which need not be installed
_WITH_PEERS = {"kernels-neural-tangents"}


def test_a_record_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    record = Record(path, {"environment": "here"})
    record.put("first", 1)
    repeated = Record(path, {"environment": "here"})
    assert "first" in repeated
    repeated.put("second", [2])
    repeated.write(summary="two")
    assert json.loads(path.read_text()) == {
        "environment": "here",
        "results": {"first": 1, "second": [2]},
        "summary": "two",
    }


def test_results_of_another_machine_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    Record(path, {"environment": "here"}).put("first", 1)
    assert Record(path, {"environment": "there"}).results == {}
    assert Record(path, {"environment": "here"}, resume=False).results == {}


def test_every_result_has_the_number_of_its_environment(tmp_path: Path) -> None:
    """Results of an older file, which lists no environments, stay as they are."""
    path = tmp_path / "record.json"
    about = {"environment": "here"}
    Record(path, about).put("older", {"final": 1})
    for name, commit in {"first": "abc", "second": "abc", "third": "def"}.items():
        Record(path, about, environment={"commit": commit}).put(name, {"final": 2})
    assert json.loads(path.read_text()) == {
        "environment": "here",
        "environments": [{"commit": "abc"}, {"commit": "def"}],
        "results": {
            "older": {"final": 1},
            "first": {"final": 2, "environment": 0},
            "second": {"final": 2, "environment": 0},
            "third": {"final": 2, "environment": 1},
        },
    }
    Record(path, {"environment": "there"}, environment={"commit": "def"}).put("fourth", {})
    assert json.loads(path.read_text()) == {
        "environment": "there",
        "environments": [{"commit": "def"}],
        "results": {"fourth": {"environment": 0}},
    }


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = Record(None, {})
    record.put("first", 1)
    assert record.results == {"first": 1}
    assert not list(tmp_path.iterdir())


def test_every_benchmark_can_be_called_by_its_name() -> None:
    summaries = list_benchmarks()
    assert len(summaries) > 15
    for name, summary in summaries.items():
        assert summary, name
        if name not in _WITH_PEERS:
            assert callable(import_benchmark(name).main), name


def import_benchmark(name: str) -> Any:
    return importlib.import_module(f"pullback_experiments.benchmarks.{name.replace('-', '_')}")


def test_the_command_runs_a_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "greedy.json"
    arguments = ["--forms", "rows", "--rows", "20", "--parameters", "30", "--vectors", "5"]
    outcome = CliRunner().invoke(app, ["bench", "greedy", *arguments, "--out", str(out)])
    assert outcome.exit_code == 0, outcome.output
    assert list(json.loads(out.read_text())["results"]) == ["rows"]


def test_unknown_names_are_refused() -> None:
    outcome = CliRunner().invoke(app, ["bench", "gredy"])
    assert outcome.exit_code == 1
    assert "There is no benchmark 'gredy'" in outcome.output
    assert "greedy" in outcome.output


@pytest.mark.parametrize("name", sorted(list_benchmarks().keys() - _WITH_PEERS))
def test_usage_names_the_benchmark(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = import_benchmark(name)
    with pytest.raises(SystemExit) as end:
        benchmark.main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: pullback bench {name} ")
    with pytest.raises(SystemExit) as refusal:
        benchmark.main(["--no-such-option"])
    assert refusal.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: pullback bench {name} ")
