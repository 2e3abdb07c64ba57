"""Names that say nothing, which library and laboratory may not bind; `make lint` runs this.

    python -m tests.vague_names

A name such as `found` or `held` says where a value came from and not what it is. A vague name with
a suffix is still vague, but this check cannot see it: it catches the habit, not every instance.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "pullback"
LABORATORY = ROOT / "experiments" / "src" / "pullback_experiments"

VAGUE = frozenset(
    """
    own some found given held every told wanted got those these mine rest both many that this such
    late early looked begun taken learned seen met kept made done went goes came same like alike
    apart alone together turned thin wide way ways thing things now then there here again
    """.split()  # noqa: SIM905 (a list of fifty strings is not easier to read)
)

#: packages, folders and files that still bind such names; an entry goes when it is clean
NOT_YET_CLEAN = frozenset({"vmc"})

#: public names, such as `every=10` for every tenth step: file ↦ the names that it may bind
OPTIONS = {
    "pde/discretization/plan.py": {"every"},
    "symmetry/descent/retractor.py": {"every"},
    "symmetry/slice_sgd.py": {"every"},
    "symmetry/sliced.py": {"every"},
}


@dataclass(frozen=True)
class Binding:
    """A vague name that a file binds, and the line."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} binds {self.name!r}"


def find_vague_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every vague name that the source binds.

    >>> list(find_vague_names("found = 1\\nself.held = found"))
    [(1, 'found'), (2, 'held')]
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name.strip("_") in VAGUE:
            yield node.lineno, name


def check_library(root: Path = LIBRARY) -> list[Binding]:
    """Return the vague names that clean packages bind."""
    bindings = []
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root)
        folders = {folder.as_posix() for folder in (file, *file.parents)}
        if folders & NOT_YET_CLEAN:
            continue
        for line, name in find_vague_names(path.read_text()):
            if name not in OPTIONS.get(file.as_posix(), ()):
                bindings.append(Binding(path, line, name))
    return bindings


def main() -> int:
    """Print the bindings; return 1 if there are any."""
    bindings = [*check_library(), *check_library(LABORATORY)]
    for binding in bindings:
        print(binding)
    if bindings:
        print("Name what the value is: `matches`, `layer`, `averages` (see CONTRIBUTING.md)")
    return int(bool(bindings))


if __name__ == "__main__":
    sys.exit(main())
