"""Names that say nothing, which no code here may bind; `make lint` runs this.

    python -m tests.vague_names

A name such as `found` or `held` says where a value came from and not what it is. A vague name with
a suffix is still vague, but this check cannot see it: it catches the habit, not every instance.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "pullback"
FOLDERS = (LIBRARY, ROOT / "experiments" / "src", ROOT / "tests", ROOT / "examples")

VAGUE = frozenset(
    """
    own some found given held every told wanted got those these mine rest both many that this such
    late early looked begun taken learned seen met kept made done went goes came same like alike
    apart alone together turned thin wide way ways thing things now then there here again
    """.split()  # noqa: SIM905 (a list of fifty strings is not easier to read)
)

#: public names, such as `every=10` for every tenth step: the library's file ↦ what it may bind
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


def check_folder(root: Path) -> list[Binding]:
    """Return the vague names that the files of a folder bind."""
    bindings = []
    for path in sorted(root.rglob("*.py")):
        allowed: set[str] = set()
        if root == LIBRARY:
            allowed = OPTIONS.get(path.relative_to(root).as_posix(), set())
        for line, name in find_vague_names(path.read_text("utf-8")):
            if name not in allowed:
                bindings.append(Binding(path, line, name))
    return bindings


def main() -> int:
    """Print the bindings; return 1 if there are any."""
    bindings = list(chain.from_iterable(map(check_folder, FOLDERS)))
    for binding in bindings:
        print(binding)
    if bindings:
        print("Name what the value is: `matches`, `layer`, `averages` (see CONTRIBUTING.md)")
    return int(bool(bindings))


if __name__ == "__main__":
    sys.exit(main())
