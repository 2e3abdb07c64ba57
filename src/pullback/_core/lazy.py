"""Packages whose parts are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports its `__all__` lazily.

    Args:
        package: its `__name__`.
        homes: submodule ↦ the names that come from it, with spaces between them. Other names of
            `__all__` are submodules themselves.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}
    here = sys.modules[package]

    def get(name: str) -> Any:
        if name in home:
            found = getattr(import_module(f".{home[name]}", package), name)
        elif name in here.__all__:
            return import_module(f".{name}", package)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(here, name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(here), *here.__all__})

    return get, names
