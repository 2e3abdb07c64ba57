"""What differs from the main branch, and the tests of it; `make check` runs these.

    python -m tests.changed sources        # changed files of both packages
    python -m tests.changed tests          # tests of everything that changed
    python -m tests.changed tests HEAD~3   # compared with another commit

A file of the library has the tests of its package, or of its folder in it where tests have that
folder too. An experiment has the tests of its own name.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path("src/pullback")
EXPERIMENTS = Path("experiments/src/pullback_experiments")
#: packages, and folders in them, whose tests have another name
FOLDERS = {"_core": "core", "likelihoods": "metrics", "testing": "laws"}
MODULES = {"framework": "runner", "commands": "cli", "volume": "flatness", "invariance": "audit"}


def find_changed(commit: str | None = None) -> list[Path]:
    """Files that differ from a commit, by default from where this branch left `origin/main`."""
    commit = commit or git("merge-base", "HEAD", "origin/main") or "HEAD"
    differ = git("diff", "--name-only", "--diff-filter=d", commit)
    new = git("ls-files", "--others", "--exclude-standard")
    return sorted({Path(line) for line in f"{differ}\n{new}".splitlines() if line})


def git(*words: str) -> str:
    """What git says; nothing where it refuses."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()


def sources(files: Iterable[Path]) -> list[Path]:
    """Those of the library and of the experiments that are Python."""
    return [f for f in files if {LIBRARY, EXPERIMENTS} & {*f.parents} and f.suffix == ".py"]


def nearest(files: Iterable[Path]) -> list[str]:
    """Paths and ids for pytest, each once; tests first, as in the whole suite.

    Where pytest reads docstrings, a module replaces the function of its name in the package.

    >>> nearest([Path("src/pullback/solvers/cholesky.py"), Path("docs/linear.md")])
    ['tests/docs/test_links.py', 'tests/docs/test_snippets.py::test_snippets_run[docs/linear.md]',
     'tests/solvers', 'src/pullback/solvers/cholesky.py']
    """
    tests = set().union(*map(_of, files))
    return sorted(tests, key=lambda test: (not test.startswith("tests"), test))


def _of(file: Path) -> Iterator[str]:
    if file.suffix == ".md" and (file.parts[0] == "docs" or file.name == "README.md"):
        yield "tests/docs/test_links.py"
        yield f"tests/docs/test_snippets.py::test_snippets_run[{file.as_posix()}]"
    elif file.suffix != ".py":
        return
    elif LIBRARY in file.parents:
        yield file.as_posix()  # its docstrings
        yield from _package(file.relative_to(LIBRARY).with_suffix("").parts)
    elif EXPERIMENTS in file.parents:
        yield file.as_posix()
        yield from _mirror(("experiments", *file.relative_to(EXPERIMENTS).with_suffix("").parts))
    elif file.parts[0] == "tests":
        yield (file if file.name.startswith("test_") else file.parent).as_posix()
    elif (ROOT / "tests" / file.parts[0]).is_dir():  # examples, benchmarks, docs
        yield f"tests/{file.parts[0]}"


def _package(module: tuple[str, ...]) -> Iterator[str]:
    """Tests of the innermost folder that tests have too, without those of other packages' folders.

    >>> list(_package(("optim", "kfac", "rules")))
    ['tests/optim/kfac']
    """
    names = FOLDERS.get(module[0], module[0]), *module[1:-1]
    folders = [Path("tests", *names[:n]) for n in range(len(names), 0, -1)]
    inner = next((f for f in folders if (ROOT / f).is_dir()), Path("tests/core"))
    package_folder = ROOT / LIBRARY / module[0]
    if any(
        (package_folder / f.name).is_dir()
        for f in (ROOT / inner).iterdir()
        if f.name != "__pycache__"
    ):
        yield from (f.relative_to(ROOT).as_posix() for f in (ROOT / inner).glob("test_*.py"))
    else:
        yield inner.as_posix()


def _mirror(names: tuple[str, ...]) -> Iterator[str]:
    """Tests of the module with these names, innermost first; its package's where it has none."""
    package = Path("tests", FOLDERS.get(names[0], names[0]))
    for name in reversed(names[1:]):
        name = MODULES.get(name, name)
        folder = ROOT / package
        if matches := [*folder.rglob(f"test_{name}.py"), *folder.rglob(name)]:
            yield from (match.relative_to(ROOT).as_posix() for match in matches)
            return
    yield (package if (ROOT / package).is_dir() else Path("tests/core")).as_posix()


if __name__ == "__main__":
    answer, *commit = sys.argv[1:]
    files = find_changed(*commit)
    print(*(sources(files) if answer == "sources" else nearest(files)), sep="\n")
