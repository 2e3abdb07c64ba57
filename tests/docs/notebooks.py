"""Jupyter notebooks with their outputs, made from the pages in docs/notebooks.

A page is the source: its python fences are the code cells, its text fences and figures the outputs,
and its prose the text cells. The test suite runs the pages and compares what they print, so a
notebook shows what its code gave.

    python -m tests.docs.snippets docs/notebooks/NAME.md    # run a page and write its outputs
    python -m tests.docs.notebooks                          # write the notebooks from the pages
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docs.snippets import FENCE, ROOT

PAGES = ROOT / "docs" / "notebooks"
FIGURE = re.compile(r"^!\[[^\]]*\]\((?P<path>[^)]+\.png)\)\n", re.MULTILINE)
FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


@dataclass
class CodeCell:
    """A python fence with what it printed and the figures that the page shows below it."""

    source: str
    output: str | None
    figures: list[Path] = field(default_factory=list)

    def to_json(self, number: int) -> dict[str, Any]:
        outputs: list[dict[str, Any]] = []
        if self.output:
            outputs.append({"name": "stdout", "output_type": "stream", "text": lines(self.output)})
        for figure in self.figures:
            image = base64.b64encode(figure.read_bytes()).decode()
            outputs.append(
                {
                    "data": {"image/png": image, "text/plain": ["<Figure>"]},
                    "metadata": {},
                    "output_type": "display_data",
                }
            )
        return {
            "cell_type": "code",
            "execution_count": number,
            "id": f"cell-{number}",
            "metadata": {},
            "outputs": outputs,
            "source": lines(self.source),
        }


@dataclass
class TextCell:
    """Prose between two python fences."""

    source: str

    def to_json(self, number: int) -> dict[str, Any]:
        return {
            "cell_type": "markdown",
            "id": f"text-{number}",
            "metadata": {},
            "source": lines(self.source),
        }


def lines(text: str) -> list[str]:
    """Return the lines of a cell, as the notebook format stores them."""
    return text.strip("\n").splitlines(keepends=True)


def cells(page: Path) -> Iterator[CodeCell | TextCell]:
    """Return the cells of a page in order; figures belong to the code above them."""
    text = FRONT_MATTER.sub("", page.read_text("utf-8"))
    position = 0
    code: CodeCell | None = None
    for match in [*FENCE.finditer(text), None]:
        end = len(text) if match is None else match.start()
        prose = text[position:end]
        if code is not None:
            figures = [page.parent / figure["path"] for figure in FIGURE.finditer(prose)]
            code.figures = [path.resolve() for path in figures]
            prose = FIGURE.sub("", prose)
            yield code
        prose = COMMENT.sub("", prose).strip()
        if prose:
            yield TextCell(prose)
        if match is not None:
            code = CodeCell(match["code"], match["output"])
            position = match.end()


def build(page: Path) -> str:
    """Return a notebook of the page, in version 4.5 of Jupyter's format."""
    content = {
        "cells": [cell.to_json(number) for number, cell in enumerate(cells(page), 1)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def pages() -> list[Path]:
    """Return the pages that are notebooks."""
    return sorted(path for path in PAGES.glob("*.md") if path.stem != "index")


if __name__ == "__main__":
    for source in pages():
        source.with_suffix(".ipynb").write_text(build(source), "utf-8")
        print(source.with_suffix(".ipynb").relative_to(ROOT))
