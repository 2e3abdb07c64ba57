"""The command `pullback`: solve and list."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pullback import pde
from pullback.experiments import environment
from pullback.experiments.cli import app

run = CliRunner()


def test_list_shows_every_setup() -> None:
    done = run.invoke(app, ["list"])
    assert done.exit_code == 0
    for name in pde.SETUPS:
        assert any(line.startswith(f"{name} ") for line in done.stdout.splitlines()), name
    assert "u_tt = 4 u_xx" in done.stdout
    assert "2-32-1" in done.stdout


def test_solve_writes_and_goes_on(tmp_path: Path) -> None:
    arguments = ["solve", "ritz", "--seed", "3", "--out", str(tmp_path)]
    done = run.invoke(app, [*arguments, "--steps", "3"])
    assert done.exit_code == 0, done.output
    for word in ("Ritz 1D", "61 parameters", "all 3 steps were taken", "relative L²"):
        assert word in done.stdout
    assert (tmp_path / "ritz.png").read_bytes()[:4] == b"\x89PNG"
    first = json.loads((tmp_path / "ritz.json").read_text())
    assert first["config"]["seed"] == 3
    assert first["config"]["options"]["steps"] == 3
    assert len(first["history"]["loss"]) == first["result"]["steps"] == 3
    assert {"torch", "device", "threads", "commit"} <= set(first["environment"])

    again = run.invoke(app, [*arguments, "--steps", "5"])
    assert "Going on from" in again.stdout
    second = json.loads((tmp_path / "ritz.json").read_text())
    assert second["history"]["loss"][:3] == first["history"]["loss"]
    assert len(second["history"]["loss"]) == 5

    fresh = run.invoke(app, [*arguments, "--steps", "2", "--fresh"])
    assert "Going on from" not in fresh.stdout
    third = json.loads((tmp_path / "ritz.json").read_text())
    assert third["history"]["loss"] == first["history"]["loss"][:2]


def test_seconds_are_a_budget(tmp_path: Path) -> None:
    done = run.invoke(app, ["solve", "ritz", "--seconds", "0", "--out", str(tmp_path)])
    assert done.exit_code == 0
    assert "budget" in done.stdout
    assert json.loads((tmp_path / "ritz.json").read_text())["result"]["loss"] is None


def test_interrupt_leaves_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, taken = pde.Run._step, []

    def interrupted(self: pde.Run):
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(1)
        return step(self)

    arguments = ["solve", "ritz", "--steps", "4", "--out", str(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(pde.Run, "_step", interrupted)
        done = run.invoke(app, arguments)
    assert done.exit_code == 130
    assert "ritz-seed0.pt" in done.stdout.replace("\n", "")
    assert run.invoke(app, arguments).exit_code == 0
    assert json.loads((tmp_path / "ritz.json").read_text())["result"]["steps"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["poison"], "poisson2d"), (["ritz", "--device", "abacus"], "--device cpu")],
)
def test_refusals_are_messages(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = run.invoke(app, ["solve", *arguments, "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert words in done.output.replace("\n", " ")
    assert "Traceback" not in done.output


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    arguments = ["--steps", "1", "--out", str(tmp_path)]
    assert run.invoke(app, ["solve", "ritz", *arguments]).exit_code == 0
    (tmp_path / "ritz-seed0.pt").rename(tmp_path / "heat1d-seed0.pt")
    done = run.invoke(app, ["solve", "heat1d", *arguments])
    assert done.exit_code == 1
    assert "another run" in done.output


def test_the_module_runs() -> None:
    command = [sys.executable, "-m", "pullback.experiments.cli", "solve", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "There is no set-up 'nothing'" in done.stderr
    assert "Traceback" not in done.stderr


def test_commit_only_of_its_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pullback

    monkeypatch.setattr(pullback, "__file__", str(tmp_path / "__init__.py"))
    assert environment.commit() is None


def test_run_repeats_an_experiment(tmp_path: Path) -> None:
    listed = run.invoke(app, ["list"])
    assert "yin-2024-shallow" in listed.stdout
    arguments = ["run", "yin-2024-shallow", "--quick", "--seeds", "0", "--out", str(tmp_path)]
    done = run.invoke(app, arguments)
    assert done.exit_code in (0, 1), done.output  # a few steps of one seed may not agree
    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit)
    assert any(tmp_path.rglob("*.json"))
    unknown = run.invoke(app, ["run", "nothing"])
    assert unknown.exit_code == 1
    assert "yin-2024-deep" in unknown.output
