"""The command `pullback`."""

import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from pullback import pde
from pullback.cli.app import app
from pullback.cli.setups import list_setups
from pullback_experiments import registry
from pullback_experiments.commands import bench, listing
from pullback_experiments.framework import executor

from .small import Small, said, slow

run = CliRunner()


def test_list_shows_every_setup() -> None:
    outcome = run.invoke(app, ["list"])
    assert outcome.exit_code == 0
    for name in pde.SETUPS:
        assert any(line.startswith(f"{name} ") for line in outcome.stdout.splitlines()), name
    assert "u_tt = 4 u_xx" in outcome.stdout
    assert "2-32-1" in outcome.stdout
    assert re.search(r"kdv .* 6 × 7-24-24-24-1, 8,502", outcome.stdout)  # one for each slab of time


@pytest.mark.parametrize("width", [40, 80, 119, 120])
def test_list_is_whole_at_any_width(width: int, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(list_setups(), listing.experiments(tmp_path, width))
    lines = said(console).splitlines()
    assert max(map(len, lines)) <= width
    first = [line.split()[0] for line in lines if line[:1].strip()]
    assert {*pde.SETUPS, *registry.names()} <= set(first)
    words = " ".join(said(console).split()).replace("x₃x₄ + …", "")
    assert "…" not in words  # nothing is cut off
    if width < 120:
        assert "20 greedily chosen tangent vectors do the work" in words


def test_an_output_that_lacks_characters_is_written_all_the_same() -> None:
    outcome = CliRunner(charset="ascii").invoke(app, ["list"])
    assert outcome.exit_code == 0, outcome.output
    assert "6 ? 7-24-24-24-1" in outcome.stdout
    assert "yin-2024-deep" in outcome.stdout


def test_every_quick_version_has_an_expected_time(tmp_path: Path) -> None:
    assert set(listing.QUICK) == set(registry.names())
    recorded = [
        listing.describe_results(registry.find(name), tmp_path) for name in registry.names()
    ]
    assert all(re.fullmatch(r"about .* \(quick\)", time) and not word for time, word in recorded)


def test_the_package_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pullback", "run", "nothing"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("pullback", run_name="__main__")
    assert ended.value.code == 1
    assert "There is no experiment 'nothing'" in capsys.readouterr().err


def test_run_repeats_an_experiment(small: list[Small], tmp_path: Path) -> None:
    small[:] = [Small(drawn=True)]
    arguments = ["run", "small", "--quick", "--seeds", "0", "--out", str(tmp_path)]
    actual = run.invoke(app, arguments)
    assert actual.exit_code == 0, actual.output
    assert {f"small-quick.{suffix}" for suffix in ("json", "png", "svg")} <= set(
        os.listdir(tmp_path)
    )
    listed = run.invoke(app, ["list", "--out", str(tmp_path)])
    assert "s (quick)" in listed.stdout
    outcome = run.invoke(app, arguments)
    assert outcome.exit_code == 0
    (tmp_path / "small-quick.json").write_text("{")
    broken = run.invoke(app, arguments)
    assert broken.exit_code == 1
    assert "cannot be read" in broken.output
    assert "unreadable" in run.invoke(app, ["list", "--out", str(tmp_path)]).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "`pullback list` shows all"),
        (["poisson2d"], "Use `pullback solve poisson2d`"),
        (["yin-2024-shalow"], "the nearest are yin-2024-shallow, yin-2024-poisson, yin-2024-deep"),
        (["yin-2024-deep", "--seeds", "a-b"], "Write 0-9"),
        (["yin-2024-deep", "--seeds", ""], "'' is no range"),
        (["yin-2024-deep", "--seeds", "1,,2"], "'' is no range"),
        (["yin-2024-deep", "--seeds", "-1"], "'-1' is no range"),
        (["yin-2024-deep", "--seeds", "0,3-1"], "'3-1' ends before it begins"),
        (["yin-2024-deep", "--seeds", "0-999999999"], "more than 10,000"),
        (["yin-2024-deep", "--seeds", str(2**63)], "is larger than"),
        (["yin-2024-deep", "--device", "meta"], "--device cpu"),
        (["yin-2024-deep", "--device", "abacus"], "--device cpu"),
        (["yin-2024-deep", "--out", __file__], "--out"),
    ],
)
def test_run_refuses_with_a_message(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run.invoke(app, ["run", *arguments])
    assert outcome.exit_code == 1
    assert words in outcome.output.replace("\n", " ")
    assert "Traceback" not in outcome.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize("command", [["run", "luk-grosse-2018"], ["solve", "ritz"], ["bench"]])
def test_no_cuda_is_a_message(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run.invoke(app, [*command, "--device", "cuda"])
    assert outcome.exit_code == 1
    assert "The device 'cuda' cannot be used" in outcome.output
    assert "--device cpu" in outcome.output.replace("\n", " ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [[], pytest.param(["--workers", "2"], marks=pytest.mark.slow)])
def test_missing_data_say_what_to_set_and_where_to_get_it(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path / "data"))
    arguments = ["run", "bai-2024-sobolev-cifar10", "--quick", "--out", str(tmp_path)]
    outcome = run.invoke(app, [*arguments, *more])
    assert outcome.exit_code == 1
    for words in ("cifar10_train_a.npz", "Set PULLBACK_DATA", "https://www.cs.toronto.edu"):
        assert words in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("command", [["run", "small"], ["solve", "ritz", "--steps", "1"]])
def test_a_folder_that_cannot_be_written_to_is_refused(
    command: list[str], small: list[Small], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode != os.W_OK)
    outcome = run.invoke(app, [*command, "--out", str(tmp_path)])
    assert outcome.exit_code == 1
    assert "Pass another --out" in outcome.output
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_message_and_leaves_what_was_there(
    small: list[Small], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["run", "small", "--out", str(tmp_path)]
    assert run.invoke(app, [*arguments, "--seeds", "0"]).exit_code == 0
    before = (tmp_path / "small.json").read_bytes()

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        outcome = run.invoke(app, [*arguments, "--seeds", "0-1"])
    assert outcome.exit_code == 1
    assert "No space left on device" in outcome.output
    assert "what was finished before is intact" in outcome.output
    assert (tmp_path / "small.json").read_bytes() == before
    assert run.invoke(app, [*arguments, "--seeds", "0-1"]).exit_code == 0


def test_results_of_another_experiment_are_refused(small: list[Small], tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text('{"format": "something else"}')
    outcome = run.invoke(app, ["run", "small", "--out", str(tmp_path)])
    assert outcome.exit_code == 1
    assert "holds no results of an experiment" in outcome.output
    assert (tmp_path / "small.json").read_text() == '{"format": "something else"}'


@pytest.mark.parametrize("option", [["--workers", "0"], ["--seconds", "-1"], ["--seeds"]])
def test_options_out_of_range_are_refused(option: list[str], small: list[Small]) -> None:
    assert run.invoke(app, ["run", "small", *option]).exit_code == 2


def test_list_names_paper_figure_claim_and_time(small: list[Small], tmp_path: Path) -> None:
    assert run.invoke(app, ["run", "small", "--out", str(tmp_path)]).exit_code == 0
    listed = run.invoke(app, ["list", "--out", str(tmp_path)])
    line = next(line for line in listed.stdout.splitlines() if line.startswith("small "))
    assert re.search(r"Nobody \(2000\), Figure 1 .* \d\.\d s +reproduced", line)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Small]:
    """An experiment that the command knows as "small"."""
    collected = [Small()]
    monkeypatch.setitem(registry.FOLDERS, "small", ("small",))
    monkeypatch.setattr(registry, "find", lambda name: collected[0])
    return collected


def test_run_passes_on_status_and_interruption(small: list[Small], tmp_path: Path) -> None:
    def invoke(ours: Small, *more: str, out: str = "a") -> Result:
        small[:] = [ours]
        return run.invoke(app, ["run", "small", "--out", str(tmp_path / out), *more])

    assert invoke(Small()).exit_code == 0
    assert invoke(Small(bad=True)).exit_code == 1
    unfinished = invoke(Small(before=slow), "--seconds", "0.01", out="b")
    assert unfinished.exit_code == 3
    assert "the same command goes on" in unfinished.stdout

    def interrupt(key: str, context: object) -> None:
        if key == "lr 0.5":
            raise KeyboardInterrupt

    outcome = invoke(Small(before=interrupt), out="c")
    assert outcome.exit_code == 130
    assert "small.json" in outcome.stdout.replace("\n", "")
    assert "Nothing was finished" in invoke(Small(before=at_once), out="d").stdout
    assert invoke(Small(), out="c").exit_code == 0


def at_once(key: str, context: object) -> None:
    raise KeyboardInterrupt


def test_bench_times_every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SIZES", ((4, 3, 2),))
    monkeypatch.setattr(bench, "LIMITS", bench.BenchLimits(steps=2))
    table = bench.table(torch.device("cpu"), ((4, 3, 2),))
    assert table.rows[0][:2] == ["4-3-2", "23"]
    assert all(isinstance(t, float) and t > 0 for t in table.rows[0][2:])
    outcome = run.invoke(app, ["bench", "--device", "abacus"])
    assert outcome.exit_code == 1


def test_list_survives_a_time_that_is_none(small: list[Small], tmp_path: Path) -> None:
    executor.run(small[0], True, out=tmp_path)
    path = tmp_path / "small-quick.json"
    record = json.loads(path.read_text())
    record["runs"][0]["took"] = 10**400
    path.write_text(json.dumps(record))
    outcome = run.invoke(app, ["list", "--out", str(tmp_path)])
    assert outcome.exit_code == 0
    assert "unreadable" in outcome.stdout
