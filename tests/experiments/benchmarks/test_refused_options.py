"""Options of the races' benchmarks that are not usable are refused before anything runs."""

import json
from pathlib import Path

import pytest
import torch

from pullback import PullbackError
from pullback_experiments import __main__ as command
from pullback_experiments import registry
from pullback_experiments.benchmarks import race_changes
from pullback_experiments.framework.timing import describe_machine

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("benchmark", "options", "words"),
    [
        ("race-changes", ["--task", "huge"], "There is no task 'huge'"),
        ("race-changes", ["--only", "momentum 0.86"], "no row 'momentum 0.86'.*momentum 0.85"),
        ("race-ablation", ["--only", "nobody"], "There is no row 'nobody'"),
        ("race-probe", ["--size", "huge", "--methods", "kfac"], "There is no task 'huge'"),
        ("race-probe", ["--size", "quick", "--methods", "kfak"], "no optimizer 'kfak'.*kfac"),
        ("race-probe", ["--methods", "kfac", "--task", "clipp=1"], "'clipp'.*clip"),
        ("race-probe", ["--size", "quick"], "There is nothing to run.*--methods"),
        ("gauss-newton-inner", ["--task", "huge"], "There is no task 'huge'"),
        ("gauss-newton-inner", ["--methods", "nobody"], "There is no optimizer 'nobody'"),
        ("gauss-newton-inner", ["--judge"], "There is no record.*Run without --judge first"),
        pytest.param("race-changes", ["--device", "cuda"], "Use --device cpu", marks=NO_GPU),
        pytest.param("race-probe", ["--device", "cuda"], "Use --device cpu", marks=NO_GPU),
        pytest.param("race-ablation", ["--device", "cuda"], "Use --device cpu", marks=NO_GPU),
        pytest.param("gauss-newton-inner", ["--device", "cuda"], "--device cpu", marks=NO_GPU),
    ],
)
def test_unknown_names_are_refused(
    benchmark: str, options: list[str], words: str, tmp_path: Path
) -> None:
    out = tmp_path / "record.json"
    if benchmark != "race-probe":
        options = [*options, "--out", str(out)]
    with pytest.raises(PullbackError, match=words):
        registry.run_benchmark(benchmark, options)
    assert not out.exists()


@pytest.mark.parametrize(
    ("benchmark", "options"),
    [
        ("race-changes", ["--steps", "0"]),
        ("race-changes", ["--workers", "0"]),
        ("race-changes", ["--seeds"]),
        ("race-ablation", ["--workers", "-1"]),
        ("race-probe", ["--lr", "nan"]),
        ("race-probe", ["--lr", "-1e-3"]),
        ("race-probe", ["--lr", "quick"]),
        ("race-probe", ["--steps", "0"]),
        ("race-probe", ["--seed", "x"]),
        ("race-probe", ["--pairs", "kfac"]),
        ("race-probe", ["--pairs", "kfac:inf"]),
        ("gauss-newton-inner", ["--outer", "0"]),
        ("gauss-newton-inner", ["--minibatches", "0"]),
        ("gauss-newton-inner", ["--inner", "0"]),
        ("gauss-newton-inner", ["--seeds"]),
        ("gauss-newton-inner", ["--seconds", "nan"]),
        ("gauss-newton-inner", ["--seconds", "0"]),
    ],
)
def test_numbers_out_of_range_are_refused(
    benchmark: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        registry.run_benchmark(benchmark, options)
    assert refusal.value.code == 2
    assert f"argument {options[0]}: " in capsys.readouterr().err


def test_a_run_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    about = {
        "environment": describe_machine(torch.device("cpu")),
        "task": "text-quick",
        "steps": 2,
        "lr": race_changes.LR,
    }
    results = {"unchanged, seed 0": {"error": "OutOfMemoryError()"}}
    out.write_text(json.dumps({**about, "results": results}), "utf-8")

    def train_all(runs: list[race_changes.ChangeRun], workers: int) -> object:
        return ((run, {"final": 1.0}) for run in runs)

    monkeypatch.setattr(race_changes, "_train_all", train_all)
    options = ["--task", "text-quick", "--steps", "2", "--seeds", "0", "--only", "unchanged"]
    race_changes.main([*options, "--out", str(out)])
    record = json.loads(out.read_text("utf-8"))
    assert record["results"] == {"unchanged, seed 0": {"final": 1.0, "environment": 0}}


def test_the_module_explains_itself_and_names_experiments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        command.main(["race-text", "--help"])
    assert "an experiment, such as race-text" in capsys.readouterr().out
    assert command.main(["race-texx", str(tmp_path / "results")]) == 1
    assert "There is no experiment 'race-texx'" in capsys.readouterr().err
    for seconds in ("nan", "-5", "soon"):
        with pytest.raises(SystemExit):
            command.main(["race-text", str(tmp_path / "results"), "1", seconds])
        assert f"{seconds!r} is no number of seconds above 0" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
