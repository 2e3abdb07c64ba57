"""The wheel of the library, in an environment that has its dependencies and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docs.snippets import ROOT, snippets

pytest.importorskip("hatchling")


def run_command(*words: object, status: int = 0) -> subprocess.CompletedProcess:
    process = subprocess.run(
        [str(w) for w in words], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == status, process.stderr
    return process


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run_command(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (path,) = folder.glob("*.whl")
    return path


def find_required(name: str, actual: set[str]) -> set[str]:
    """A distribution and all that it requires here."""
    if name not in actual:
        actual.add(name)
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                find_required(requirement.name, actual)
    return actual


def test_the_wheel_holds_the_library_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (path,) = [n for n in names if n.endswith("METADATA")]
        metadata = archive.read(path).decode()
    assert {n.partition("/")[0] for n in names} == {"pullback", Path(path).parts[0]}
    assert not [n for n in names if "experiments" in n or "tests" in n]
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    plain = {Requirement(r.partition(":")[2]).name for r in required if "extra ==" not in r}
    assert plain == {"torch", "numpy", "scipy"}


@pytest.mark.slow
def test_the_first_snippet_runs_where_nothing_else_is_installed(
    wheel: Path, tmp_path: Path
) -> None:
    run_command(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    folder = "Scripts" if sys.platform == "win32" else "bin"
    python = tmp_path / "env" / folder / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run_command(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run_command(python, "-I", "-c", where).stdout.strip())
    for name in set().union(*(find_required(n, set()) for n in ("torch", "numpy", "scipy"))):
        files = distribution(name).files or ()
        for top in {f.parts[0] for f in files} - {"..", "__pycache__"}:
            (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))

    first = next(snippets((ROOT / "README.md").read_text("utf-8"))).code
    first = first.replace("range(50)", "range(3)")
    process = run_command(python, "-I", "-c", f"{first}\nprint(pb.__file__)")
    *_, imported_file = process.stdout.splitlines()  # after the loss
    assert Path(imported_file).is_relative_to(site)
    command = run_command(python, "-I", "-m", "pullback", "doctor", status=1)
    assert command.stderr.endswith("pip install 'pullback[cli]'\n")
