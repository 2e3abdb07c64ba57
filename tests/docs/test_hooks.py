"""What the hooks make of docstrings and pages."""

import importlib.util
from types import ModuleType

import pytest

from tests.docs.snippets import ROOT


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/hooks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_are_fenced() -> None:
    pytest.importorskip("griffe")
    fenced = hook("doctests").fenced
    text = "Adds.\n\n>>> add(1, 2)\n[3, 4]\n\nMore.\n"
    assert fenced(text) == "Adds.\n\n```pycon\n>>> add(1, 2)\n[3, 4]\n```\n\nMore.\n"
    assert fenced("No example.") == "No example."


def test_formulas_are_typeset() -> None:
    pytest.importorskip("latex2mathml")
    shown = hook("formulas").typeset(r"G = A^\top A")
    assert "<math" in shown
    assert "<msup>" in shown


def test_indices_are_set_in_words_and_not_in_code() -> None:
    pytest.importorskip("latex2mathml")
    shown = hook("formulas").on_page_content(
        "<p>w_{k+1} = e^(−d) x_i, T_wS, a state_dict</p><code>a_i</code>"
    )
    assert shown == (
        "<p>w<sub>k+1</sub> = e<sup>−d</sup> x<sub>i</sub>, T<sub>w</sub>S, a state_dict</p>"
        "<code>a_i</code>"
    )


def test_figures_open_at_full_size() -> None:
    shown = hook("figures").on_page_content('<p><img alt="A" src="a.png" /></p>')
    assert shown == '<p><a href="a.png"><img alt="A" src="a.png" /></a></p>'


def test_numbers_and_names_are_not_broken() -> None:
    shown = hook("figures").on_page_content('<p>1e-3</p><a href="K-FAC">K-FAC</a><pre>7e-14</pre>')
    assert shown == (
        '<p><span class="number">1e-3</span></p>'
        '<a href="K-FAC"><span class="number">K-FAC</span></a><pre>7e-14</pre>'
    )


def test_the_gallery_shows_whole_programs() -> None:
    shown = hook("programs").include_programs("`examples/slices.py`: scales.\n\nMore.\n")
    assert shown.startswith("`examples/slices.py`: scales.\n\n???+ example")
    assert "    import pullback as pb\n" in shown
    assert shown.endswith("    ```\n\nMore.\n")
