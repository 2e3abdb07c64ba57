"""Tables of the README and the docs, written from the records in experiments/results.

    python -m pullback_experiments.tables            # write them anew
    python -m pullback_experiments.tables --check    # say which pages do not agree with the records

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``; ``of:EXPERIMENT`` is the first
that an experiment's record holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ..framework.checkout import REPOSITORY
from .costs import costs, kfac, race_images, race_text, race_text_larger, races, rules
from .curvature import influence, influence_dampings, influence_scale, laplace_rotation
from .defaults import pde_defaults, pde_seeds
from .gallery import pde_gallery
from .numbers import Rows
from .outer_steps import gauss_newton
from .peers import (
    exact,
    kernels,
    pde,
    pde_chosen,
    scale,
)
from .small_tasks import small_tasks
from .traffic import traffic
from .verdicts import copy_first_table, verdicts

#: name -> its rows, of which the first is the head
TABLES: dict[str, Callable[[], Rows]] = {
    table.__name__: table
    for table in (
        verdicts,
        *(costs, kfac, rules, races, race_text, race_text_larger, race_images, gauss_newton),
        *(exact, scale, pde, pde_chosen, kernels),
        *(pde_gallery, pde_defaults, pde_seeds, traffic, small_tasks),
        *(influence, influence_dampings, influence_scale, laplace_rotation),
    )
}
BLOCK = re.compile(r"<!-- table (?P<name>\S+) -->\n.*?<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    """Every page that may hold a table."""
    return [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]


def fill_tables(text: str) -> str:
    """A page's text with each of its tables as the records have it."""

    def block(match: re.Match[str]) -> str:
        table, _, experiment = match["name"].partition("of:")
        if experiment:
            rows = copy_first_table(experiment)
        else:
            rows = TABLES[table]()
        lines = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        head, _, body = lines.partition("\n")
        rule = "|" + "---|" * len(rows[0])
        return f"<!-- table {match['name']} -->\n{head}\n{rule}\n{body}\n<!-- end -->"

    return BLOCK.sub(block, text)


def stale() -> list[Path]:
    """Return the pages whose tables differ from the records; dates are ignored."""

    def bare(text: str) -> str:
        return re.sub(r"\b\d{4}-\d\d-\d\d\b", "", text)

    texts = {page: page.read_text("utf-8") for page in pages()}
    return [page for page, text in texts.items() if bare(fill_tables(text)) != bare(text)]
