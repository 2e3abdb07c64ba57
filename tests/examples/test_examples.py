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


def test_the_gallery_shows_every_example() -> None:
    page = (FOLDER.parent / "docs/gallery.md").read_text("utf-8")
    assert [p.name for p in FOLDER.glob("*.py") if f"examples/{p.name}`: " not in page] == []


#: examples that need more than 70 lines: this one trains a decoder and rounds it in three ways
LONG_EXAMPLES = {"round_weights": 150}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) < LONG_EXAMPLES.get(path.stem, 70)


def test_exact_classification() -> None:
    assert run("exact_classification", steps=20) > 0.99


@pytest.mark.slow
def test_pinn_from_scratch() -> None:
    assert run("pinn_from_scratch", steps=40) < 1e-3


@pytest.mark.slow
def test_blow_up() -> None:
    assert run("blow_up", steps=120) < 1e-4


@pytest.mark.slow
def test_boundary_layer() -> None:
    assert run("boundary_layer", steps=30) < 1e-6


@pytest.mark.slow
def test_corner() -> None:
    assert run("corner", steps=25, points=200) < 1e-2


def test_deepxde_poisson() -> None:
    pytest.importorskip("deepxde", reason="DeepXDE is not installed")
    assert run("deepxde_poisson") < 1e-4


@pytest.mark.slow
def test_pina_poisson() -> None:
    pytest.importorskip("pina", reason="PINA is not installed")
    assert run("pina_poisson") < 1e-3


def test_kfac_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kfac_plain_loop", epochs=2) > 0.95
    assert "BatchNorm1d" in capsys.readouterr().out


def test_muon_roles(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("muon_roles", steps=60) > 0.9
    assert "32+32+32" in capsys.readouterr().out


def test_kfac_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In one process, with a checkpoint from which it goes on."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    run("kfac_torchrun", folder=str(tmp_path), steps=40)
    assert run("kfac_torchrun", folder=str(tmp_path), steps=80) > 0.95


def test_pde_torchrun(tmp_path: Path) -> None:
    """In one process; tests/distributed has more of them."""
    run("pde_torchrun", checkpoint=tmp_path / "run.pt", steps=15)
    assert run("pde_torchrun", checkpoint=tmp_path / "run.pt", steps=30) < 0.1


@pytest.mark.slow
def test_kfac_lightning() -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    assert run("kfac_lightning", epochs=5) > 0.95


def test_kfac_trainer() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    first, last = run("kfac_trainer", steps=30)
    assert last < 0.9 * first


@pytest.mark.slow
def test_kfac_lora() -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    first, last = run("kfac_lora")
    assert last < 0.3 * first


@pytest.mark.slow
def test_kfac_torchvision() -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    assert run("kfac_torchvision") > 0.8


def test_tangent_kernel() -> None:
    plain, natural, condition = run("tangent_kernel")
    assert plain < 1e-5
    assert natural < 1e-3
    assert condition > 1e3


def test_slices() -> None:
    ends = run("slices", steps=20)
    was, rescaled = ends["SGD"]
    assert not abs(rescaled - was) < 1
    for name in ("SliceSGD", "Sliced Adam"):
        was, rescaled = ends[name]
        assert abs(rescaled - was) < 1e-6 * was


def test_population_fisher(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(loss < 0.65 for loss in run("population_fisher"))
    assert "2000 rows, rank 81" in capsys.readouterr().out


def test_constrained_covariance() -> None:
    lowest, distance = run("constrained_covariance")
    assert lowest >= 1e-3
    assert distance < 1e-3


@pytest.mark.slow
def test_poisson(tmp_path: Path) -> None:
    assert run("poisson", steps=60, out=tmp_path / "poisson.png") < 3e-2
    assert (tmp_path / "poisson.png").stat().st_size > 10_000


@pytest.mark.slow
def test_burgers_inverse() -> None:
    assert abs(run("burgers_inverse", steps=30) - 0.1) < 2e-2


def test_ising_chain() -> None:
    assert run("ising_chain", sites=8, steps=40) < 1e-3


@pytest.mark.slow
def test_own_hamiltonian() -> None:
    assert run("own_hamiltonian", sites=6, steps=40) < 1e-2


@pytest.mark.slow
def test_round_weights() -> None:
    divergences = run("round_weights", steps=200, widths=(3,))
    plain, one_sided, two_sided = (values[0] for values in divergences.values())
    assert two_sided < one_sided < plain
