"""Small tasks train, and the summary picks the best rate of each method."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import pullback as pb
from pullback_experiments.benchmarks import small_tasks
from pullback_experiments.benchmarks.small_models import ASIDE_TASKS, OPEN_TASKS, TASKS, Task
from pullback_experiments.benchmarks.small_tasks import (
    METHODS,
    Job,
    find_best,
    rank_settings,
    run,
    run_job,
)
from pullback_experiments.learning.data import available
from tests.integrations.common import needs


def _shorten(monkeypatch: pytest.MonkeyPatch, name: str, steps: int) -> None:
    task = TASKS[name]()
    short = Task(task.models, task.train, task.judge, task.samples, 16, steps)
    monkeypatch.setitem(TASKS, name, lambda: short)


def test_ten_tasks_to_choose_by_and_five_aside() -> None:
    assert (len(OPEN_TASKS), len(ASIDE_TASKS)) == (10, 5)
    assert not OPEN_TASKS.keys() & ASIDE_TASKS.keys()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *[("tabular", method) for method in METHODS],
        ("adversarial", "kfac"),
        ("forecast", "kfac"),
    ],
)
def test_every_method_trains(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    _shorten(monkeypatch, name, 6)
    assert run(name, 0, method, 1e-3 if method in ("adam", "muon") else 1.0).loss < 10


@pytest.mark.skipif(not available("digits8x8.npz"), reason="needs the digits")
def test_structured_outputs_and_batch_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("variational", "convolutions", "siamese"):
        torch.manual_seed(0)
        _shorten(monkeypatch, name, 6)
        assert run(name, 0, "kfac", 1.0).loss < 50


def test_kfac_and_what_depends_on_its_time_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _shorten(monkeypatch, "tabular", 6)
    monkeypatch.setattr(small_tasks, "measure_step_ratio", lambda name: 2.0)
    monkeypatch.setattr(small_tasks, "ADAM_RATES", (0.001,))
    adam = {"loss": 0.5, "step_seconds": 1e-3}
    row = {"task": "tabular", "seed": 0, "runs": {"adam 0.001": adam, "kfac 4": adam}}
    runs = run_job(Job("tabular", 0, False, row))["runs"]
    assert runs.keys() == {"adam 0.001", "adam-longer 0.001", "kfac 0.5", "kfac 1", "kfac 2"}
    assert runs["adam 0.001"] == adam
    row["step over Adam's"] = 3.0
    repeated = run_job(Job("tabular", 0, False, row, has_same_time=True))
    assert repeated["step over Adam's"] == 3.0
    assert "adam-longer 0.001" not in repeated["runs"]


def test_times_of_steps_are_compared_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    _shorten(monkeypatch, "tabular", 6)
    assert small_tasks.measure_step_ratio("tabular", portion=2) > 0


def test_a_run_that_was_interrupted_is_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ADAM_RATES", "MUON_RATES", "MULTIPLES", "VARIANT_MULTIPLES"):
        monkeypatch.setattr(small_tasks, name, (1.0,))
    trained: list[str] = []
    broken_tasks = {"tabular"}

    def run_job(job: Job) -> dict[str, Any]:
        trained.append(job.task)
        if job.task in broken_tasks:
            raise KeyboardInterrupt
        outcome = {"loss": 1.0, "step_seconds": 1e-3}
        runs = dict.fromkeys(("adam 1", "muon 1", "kfac 1", "adam-longer 1"), outcome)
        return {"task": job.task, "seed": job.seed, "step over Adam's": 2.0, "runs": runs}

    monkeypatch.setattr(small_tasks, "run_job", run_job)
    monkeypatch.setattr(small_tasks, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    path = tmp_path / "record.json"
    command = ["--tasks", "graph,tabular", "--seeds", "1", "--resume", "--out", str(path)]
    with pytest.raises(KeyboardInterrupt):
        small_tasks.main(command)
    assert [row["task"] for row in json.loads(path.read_text())["rows"]] == ["graph"]
    broken_tasks.clear()
    small_tasks.main(command)
    assert trained == ["graph", "tabular", "tabular"]
    record = json.loads(path.read_text())
    assert [row["task"] for row in record["rows"]] == ["graph", "tabular"]
    path.write_text(json.dumps(record | {"environment": "another machine"}))
    with pytest.raises(pb.PullbackError, match="cannot be resumed"):
        small_tasks.main(command)


@needs("transformers", "accelerate")
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_takes_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    _shorten(monkeypatch, "distilbert", 3)
    assert run("distilbert", 0, "kfac", 1.0).loss < 2


def test_the_best_rate_and_whether_it_is_at_the_edge() -> None:
    seeds = [
        {"runs": {"adam 0.1": {"loss": 3.0}, "adam 0.2": {"loss": 1.0}, "adam 0.3": {"loss": loss}}}
        for loss in (0.1, 2.0, 2.0)
    ]
    best = find_best(seeds, "adam", (0.3, 0.1, 0.2))
    assert (best.rate, best.loss, best.is_edge) == (0.2, 1.0, False)
    assert find_best(seeds, "adam", (0.1, 0.2)).is_edge


def test_settings_are_ranked_by_loss_and_time() -> None:
    methods = {"kfac": (1.0, 1e-3), "kfac-seldom": (1.1, 5e-4), "kfac-long": (1.2, 1e-3)}
    runs = {}
    for method, (loss, seconds) in methods.items():
        for multiple in ("1", "1.5", "2"):
            runs[f"{method} {multiple}"] = {"loss": loss, "step_seconds": seconds}
    settings = rank_settings([{"task": "tabular", "seed": 0, "runs": runs}])
    assert settings[0].method == "kfac-seldom"  # 10 % more loss in half of the time
    assert settings[0].score == pytest.approx(math.log(1.1) - 0.3 * math.log(2))
    assert settings[-1].method == "kfac-long"
