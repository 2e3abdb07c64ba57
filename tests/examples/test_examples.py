"""Every example runs, and reaches what its docstring says."""

import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, **options: Any):
    return runpy.run_path(str(FOLDER / f"{name}.py"))["main"](**options)


def test_every_example_has_a_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert {path.stem for path in FOLDER.glob("*.py")} <= tested


def test_exact_classification() -> None:
    assert run("exact_classification", steps=20) > 0.99


def test_least_squares_pinn_style() -> None:
    assert run("least_squares_pinn_style") < 1e-6


def test_population_fisher(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(loss < 0.65 for loss in run("population_fisher"))
    assert "2000 rows, rank 81" in capsys.readouterr().out


def test_constrained_covariance() -> None:
    lowest, distance = run("constrained_covariance")
    assert lowest >= 1e-3
    assert distance < 1e-3


def test_poisson(tmp_path: Path) -> None:
    assert run("poisson", steps=60, out=tmp_path / "poisson.png") < 3e-2
    assert (tmp_path / "poisson.png").stat().st_size > 10_000


def test_burgers_inverse() -> None:
    assert abs(run("burgers_inverse", steps=50) - 0.1) < 5e-3
