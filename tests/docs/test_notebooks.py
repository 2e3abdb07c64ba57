"""Notebooks are those of their pages, whose code other tests run."""

import json
from itertools import chain
from pathlib import Path

import pytest

from tests.docs.notebooks import build, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_the_notebook_is_that_of_its_page(page: Path) -> None:
    written = page.with_suffix(".ipynb").read_text("utf-8")
    assert written == build(page), "run `python -m tests.docs.notebooks`"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_a_notebook_keeps_outputs_and_pictures(page: Path) -> None:
    cells = json.loads(page.with_suffix(".ipynb").read_text("utf-8"))["cells"]
    outputs = list(chain.from_iterable(cell.get("outputs", ()) for cell in cells))
    assert any(output["output_type"] == "stream" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
