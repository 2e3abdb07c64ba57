"""What the reference makes of docstrings."""

import importlib.util

import pytest

from tests.docs.snippets import ROOT

pytest.importorskip("griffe")


def test_examples_are_fenced() -> None:
    path = ROOT / "docs/hooks/doctests.py"
    spec = importlib.util.spec_from_file_location("doctests", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "Adds.\n\n>>> add(1, 2)\n[3, 4]\n\nMore.\n"
    assert module.fenced(text) == "Adds.\n\n```pycon\n>>> add(1, 2)\n[3, 4]\n```\n\nMore.\n"
    assert module.fenced("No example.") == "No example."
