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
    home_of_name: dict[str, str] = {}
    for submodule, names in homes.items():
        home_of_name |= dict.fromkeys(names.split(), submodule)
    module = sys.modules[package]

    def get_attribute(name: str) -> Any:
        if name in home_of_name:
            value = getattr(import_module(f".{home_of_name[name]}", package), name)
            setattr(module, name, value)
            return value
        if name in module.__all__:
            return import_module(f".{name}", package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return sorted({*vars(module), *module.__all__})

    return get_attribute, list_names
