"""The commands of the library: `solve`, `doctor`, and what is said where a package is missing."""

import json
import math
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from pullback import __version__, pde
from pullback.cli import doctor, record
from pullback.cli.app import app, refuse_missing_command
from pullback.pde.judgement.stop import StopReason
from pullback.pde.networks.modules import Slabs

run = CliRunner()


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing: a picture takes longer than the steps of these runs."""
    monkeypatch.setattr(pde.PDESolution, "plot", lambda solution, path: None)


def test_solve_without_a_name_shows_the_setups() -> None:
    outcome = run.invoke(app, ["solve"])
    assert outcome.exit_code == 0
    assert all(f"\n{name} " in outcome.stdout for name in pde.SETUPS)
    assert "kdv" in pde.SETUPS  # which the experiments add


def test_the_command_knows_what_the_experiments_add() -> None:
    names = {command.name for command in app.registered_commands}
    assert names >= {"run", "list", "report", "bench"}


def test_commands_of_a_package_that_is_missing_name_it() -> None:
    bare = typer.Typer()
    bare.command("other")(lambda: None)
    bare.command("run", hidden=True)(refuse_missing_command)
    outcome = run.invoke(bare, ["run"])
    assert outcome.exit_code == 1
    assert "pip install ./experiments" in outcome.output


def test_slabs_of_time_are_described_as_such() -> None:
    slab = pde.mlp(2, 5, 1, seed=0)
    assert record.describe_network(Slabs([slab, slab], torch.linspace(0, 1, 3))) == "2 × 2-5-1"


def test_a_hundred_small_networks_are_described_as_such() -> None:
    network = pde.setup("poisson10d-separable").network(0)
    assert record.describe_network(network) == "functions of one coordinate"


def test_solve_writes_and_goes_on(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments = ["solve", "ritz", "--seed", "3", "--out", str(tmp_path)]
    outcome = run.invoke(app, [*arguments, "--steps", "3"])
    assert outcome.exit_code == 0, outcome.output
    for word in ("Ritz 1D", "61 parameters", "all 3 steps were taken", "relative L²"):
        assert word in outcome.stdout
    assert (tmp_path / "ritz-seed3.png").read_bytes()[:4] == b"\x89PNG"
    first = json.loads((tmp_path / "ritz-seed3.json").read_text())
    assert first["config"]["seed"] == 3
    assert first["config"]["options"]["steps"] == 3
    assert len(first["history"]["loss"]) == first["result"]["steps"] == 3
    assert {"torch", "device", "threads"} <= set(first["environment"])

    request.getfixturevalue("blank_pictures")
    resumed = run.invoke(app, [*arguments, "--steps", "5"])
    assert "Going on from" in resumed.stdout
    second = json.loads((tmp_path / "ritz-seed3.json").read_text())
    assert second["history"]["loss"][:3] == first["history"]["loss"]
    assert len(second["history"]["loss"]) == 5

    fresh = run.invoke(app, [*arguments, "--steps", "2", "--fresh"])
    assert "Going on from" not in fresh.stdout
    third = json.loads((tmp_path / "ritz-seed3.json").read_text())
    assert third["history"]["loss"] == first["history"]["loss"][:2]


def test_a_problem_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "from pullback import pde\n"
        "problem = pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.xx + 1),\n"
        "                      pde.Dirichlet(0.0)], name='Mine')\n"
        "network = lambda seed: pde.mlp(1, 5, 1, seed=seed)\n"
        "options = {'points': 20}\n"
    )
    outcome = run.invoke(app, ["solve", str(file), "--steps", "3", "--out", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert "Mine" in outcome.stdout
    config = json.loads((tmp_path / "mine.json").read_text())["config"]
    assert config["network"] == "1-5-1"
    report = run.invoke(app, ["report", "--out", str(tmp_path)])
    assert report.exit_code == 0, report.output
    assert f"pullback solve {file} --seed 0" in (tmp_path / "report.html").read_text("utf-8")


PROBLEM = (
    "from pullback import pde\n"
    "problem = pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.xx + 1),\n"
    "                      pde.Dirichlet(0.0)])\n"
)
FILES = {
    "no problem": ("network = 3\n", "defines no problem"),
    "another thing": ("problem = 3\n", "problem is 3"),
    "a slip": ("from pullback import pde\nproblem = pde.Problm()\n", "line 2: AttributeError"),
    "its syntax": ("x = 1\nproblem = (\n", "line 2: SyntaxError"),
    "a missing package": ("import nothing_of_this_name\n", "line 1: ModuleNotFoundError"),
    "a refusal": ("from pullback import pde\npde.Interval(1, 0)\n", "interval is empty"),
    "a module": (PROBLEM + "network = pde.mlp(1, 5, 1)\n", "is no function"),
    "no seed": (PROBLEM + "network = lambda: pde.mlp(1, 5, 1)\n", "takes no seed"),
    "no network": (PROBLEM + "network = lambda seed: seed\n", "is no module"),
    "options": (PROBLEM + "options = 3\n", "no dict"),
    "an option": (PROBLEM + "options = {'stesp': 3}\n", "'stesp'"),
    "the command's": (PROBLEM + "options = {'device': 'cpu'}\n", "has --device"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_problems(case: str, tmp_path: Path) -> None:
    text, said = FILES[case]
    file = tmp_path / "mine.py"
    file.write_text(text)
    bad = run.invoke(app, ["solve", str(file), "--out", str(tmp_path)])
    assert bad.exit_code == 1
    assert said in " ".join(bad.output.split())
    assert "Traceback" not in bad.output


@pytest.mark.usefixtures("blank_pictures")
def test_a_file_without_a_network_and_with_a_neighbor(tmp_path: Path) -> None:
    (tmp_path / "neighbor_of_mine.py").write_text("LENGTH = 2\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from neighbor_of_mine import LENGTH\n" + PROBLEM.replace("(0, 1)", "(0, LENGTH)")
    )
    arguments = ["solve", str(file), "--steps", "2", "--seed", "1", "--out", str(tmp_path)]
    outcome = run.invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "mine-seed1.json").exists()
    missing = run.invoke(app, ["solve", str(tmp_path / "yours.py"), "--out", str(tmp_path)])
    assert missing.exit_code == 1
    assert "There is no file" in missing.output


@pytest.mark.usefixtures("blank_pictures")
def test_seconds_are_a_budget(tmp_path: Path) -> None:
    outcome = run.invoke(app, ["solve", "ritz", "--seconds", "0", "--out", str(tmp_path)])
    assert outcome.exit_code == 0
    assert "budget" in outcome.stdout
    assert json.loads((tmp_path / "ritz.json").read_text())["result"]["loss"] is None


INTERRUPT_ONCE = """
from pathlib import Path

def interrupt(run, info):
    marker = Path(__file__).with_name("interrupted")
    if len(run.history) == 2 and not marker.exists():
        marker.touch()
        raise KeyboardInterrupt

options = {"points": 20, "callbacks": [interrupt]}
"""


@pytest.mark.usefixtures("blank_pictures")
def test_interrupt_leaves_the_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PROBLEM + INTERRUPT_ONCE)
    arguments = ["solve", str(file), "--steps", "4", "--out", str(tmp_path)]
    outcome = run.invoke(app, arguments)
    assert outcome.exit_code == 130, outcome.output
    assert "mine-seed0.pt" in outcome.stdout.replace("\n", "")
    outcome = run.invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert json.loads((tmp_path / "mine.json").read_text())["result"]["steps"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["poison"], "the nearest are poisson5d, poisson2d, poisson10d"),
        (["lost.py"], "There is no file lost.py: looked in /"),
        (["kfac-vgg"], "Use `pullback run kfac-vgg`"),
        (["ritz", "--device", "abacus"], "--device cpu"),
    ],
)
def test_refusals_are_messages(arguments: list[str], words: str, tmp_path: Path) -> None:
    outcome = run.invoke(app, ["solve", *arguments, "--out", str(tmp_path)])
    assert outcome.exit_code == 1
    assert words in outcome.output.replace("\n", " ")
    assert "Traceback" not in outcome.output


@pytest.mark.usefixtures("blank_pictures")
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    arguments = ["--steps", "1", "--out", str(tmp_path)]
    assert run.invoke(app, ["solve", "ritz", *arguments]).exit_code == 0
    (tmp_path / "ritz-seed0.pt").rename(tmp_path / "heat1d-seed0.pt")
    outcome = run.invoke(app, ["solve", "heat1d", *arguments])
    assert outcome.exit_code == 1
    assert "another run" in outcome.output


@pytest.mark.usefixtures("blank_pictures")
def test_solve_on_a_full_disk_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["solve", "ritz", "--out", str(tmp_path), "--steps"]
    assert run.invoke(app, [*arguments, "1"]).exit_code == 0
    checkpoint = (tmp_path / "ritz-seed0.pt").read_bytes()

    def full(content: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos")

    monkeypatch.setattr(torch, "save", full)
    outcome = run.invoke(app, [*arguments, "2"])
    assert outcome.exit_code == 1
    assert "Free some space" in outcome.output.replace("\n", " ")
    assert "Traceback" not in outcome.output
    assert (tmp_path / "ritz-seed0.pt").read_bytes() == checkpoint
    assert not list(tmp_path.glob("*.part"))


def test_version() -> None:
    assert run.invoke(app, ["--version"]).stdout == f"pullback {__version__}\n"


def test_doctor_finds_the_numerics_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULLBACK_DATA", "/some/[where]")
    outcome = run.invoke(app, ["doctor"])
    assert outcome.exit_code == 0, outcome.output
    for word in ("torch", "natural gradient", "K-FAC", "/some/[where]", "good"):
        assert word in outcome.stdout
    assert "wrong" not in outcome.stdout


def test_doctor_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> float:
        raise ValueError("[oh] no")

    checks = (
        doctor.Check("a", lambda device: 0.1, 1e-3),
        doctor.Check("b", broken, 1.0),
        doctor.Check("c", lambda device: math.nan, 1.0),
    )
    monkeypatch.setattr(doctor, "CHECKS", checks)
    outcome = run.invoke(app, ["doctor"])
    assert outcome.exit_code == 1
    assert outcome.stdout.count("wrong") == 3
    assert "ValueError: [oh] no" in outcome.stdout


@pytest.mark.usefixtures("blank_pictures")
def test_warnings_are_lines_without_source(tmp_path: Path) -> None:
    file = tmp_path / "warning_problem.py"
    file.write_text(
        "import warnings\nfrom pullback import pde\nproblem = pde.Poisson(dim=1)\n"
        'network = lambda seed: pde.mlp(1, 4, 1, seed=seed)\nwarnings.warn("mind the gap")\n'
    )
    outcome = run.invoke(app, ["solve", str(file), "--steps", "1", "--out", str(tmp_path)])
    assert outcome.exit_code == 0
    assert "warning: mind the gap" in outcome.stderr
    assert "warnings.warn" not in outcome.stderr
    assert "warning_problem.py:" not in outcome.stderr


@pytest.mark.slow
def test_solve_ends_at_round_off() -> None:
    solution = pde.solve(pde.Poisson(dim=1), pde.mlp(1, 12, 1, seed=0), steps=300, progress=False)
    assert solution.verdict.stop.reason is StopReason.ROUNDOFF_REACHED
    assert len(solution.history) < 150
    assert solution.error < 1e-13
