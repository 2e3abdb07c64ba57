"""Results of the races' benchmarks name the commit that they are from, and failures are told."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pullback_experiments.benchmarks import gauss_newton_inner, race_ablation, race_changes
from pullback_experiments.framework.environment import environment


def train_outer(run: gauss_newton_inner.OuterRun) -> dict[str, Any]:
    """Return what a run gives, whose best rate is 0.024."""
    return {
        **asdict(run), "passes": run.passes, "seconds": 0.0, "final": 1 + abs(run.lr - 0.024),
    }  # fmt: skip


#: benchmark, what trains, its stand-in, and options
BENCHMARKS = [
    (race_changes, (race_changes.ChangeRun, "train"), lambda run: {"final": 1.0},
     ["--task", "text-quick", "--steps", "2", "--only", "unchanged", "--seeds", "0"]),
    (race_ablation, (race_ablation, "_run"), lambda *run: {"final": 1.0},
     ["--only", "damping 1"]),
    (gauss_newton_inner, (gauss_newton_inner.OuterRun, "train"), train_outer,
     ["--task", "text-quick", "--inner", "--small", "--lengths", "1", "--methods", "kfac"]),
]  # fmt: skip


@pytest.fixture(params=BENCHMARKS, ids=lambda case: case[0].__name__.rpartition(".")[2])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a benchmark as in `BENCHMARKS`, whose processes are threads here."""
    benchmark = request.param[0]
    monkeypatch.setattr(
        benchmark, "ProcessPoolExecutor", lambda workers, context: ThreadPoolExecutor(workers)
    )
    return request.param


def test_results_name_the_commit(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark, trainer, stand_in, options = case
    monkeypatch.setattr(*trainer, stand_in)
    out = tmp_path / "record.json"
    benchmark.main([*options, "--out", str(out)])
    record = json.loads(out.read_text("utf-8"))
    assert record["environments"] == [environment("cpu")]
    assert "commit" in record["environments"][0]
    assert record["results"]
    assert all(result["environment"] == 0 for result in record["results"].values())


def test_failed_runs_end_with_a_status(
    case: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    benchmark, trainer, _, options = case
    monkeypatch.setattr(*trainer, fail)
    with pytest.raises(SystemExit) as ended:
        benchmark.main([*options, "--out", str(tmp_path / "record.json")])
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "out of memory" in said.out
    assert " failed" in said.err
