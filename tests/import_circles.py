"""Circles of imports, deferred ones and those for types included; `make contracts` runs this.

    python -m tests.import_circles

The import contracts keep packages in order. Two modules of one package may still import each other,
at run time by a deferred import or for types alone, and then neither can be read before the other.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

PACKAGES = ("pullback", "pullback_experiments")


def find_circles(imports: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others.

    Args:
        imports: module ↦ the modules that it imports.

    >>> find_circles({"a": ["b"], "b": ["c"], "c": ["b"]})
    [['b', 'c']]
    """
    reachable = {module: _find_reachable(module, imports) for module in imports}
    circles: list[list[str]] = []
    for module, targets in sorted(reachable.items()):
        if module in targets:
            circle = sorted(other for other in targets if module in reachable[other])
            if circle not in circles:
                circles.append(circle)
    return circles


def _find_reachable(start: str, imports: Mapping[str, Collection[str]]) -> set[str]:
    """Return the modules that importing `start` imports, itself only if it is in a circle."""
    reachable: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(imports[waiting.pop()]) - reachable
        reachable |= new
        waiting += new
    return reachable


def main() -> int:
    """Print the circles; return 1 if there are any."""
    import grimp  # comes with import-linter

    graph = grimp.build_graph(*PACKAGES)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    circles = find_circles(imports)
    for circle in circles:
        print("import each other:", ", ".join(circle))
    if circles:
        print("Move what both need to a module that imports neither")
    return int(bool(circles))


if __name__ == "__main__":
    sys.exit(main())
