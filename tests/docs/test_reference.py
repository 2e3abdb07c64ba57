"""The reference has every public function and class."""

import inspect
import re
from importlib import import_module
from pkgutil import iter_modules

import pytest

import pullback as pb
from tests.docs.snippets import ROOT

PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)
NAMED = re.findall(r"^::: (\S+)$", TEXT, re.MULTILINE)
PACKAGES = [f"pullback.{m.name}" for m in iter_modules(pb.__path__) if not m.name.startswith("_")]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_function_called_like_its_module_has_an_entry_of_its_own(package: str) -> None:
    """A page on the package takes `kernels.gtk` for the module, and leaves the function out."""
    assert package in NAMED
    module = import_module(package)
    for name in module.__all__:
        actual = getattr(module, name)
        above, _, last = getattr(actual, "__module__", "").rpartition(".")
        if last == name and getattr(import_module(above), name) is actual:
            assert f"{above}.{name}.{name}" in NAMED


def test_what_is_public_at_the_top_has_an_entry() -> None:
    for name in pb.__all__:
        actual = getattr(pb, name)
        if inspect.isclass(actual):
            home = ".".join(actual.__module__.split(".")[:2])
            assert home in NAMED or f"{actual.__module__}.{name}" in NAMED, name
