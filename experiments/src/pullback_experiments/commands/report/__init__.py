"""One page on all results under a folder: claims, verdicts, figures, tables, environments.

The page is one file. It needs no network, and its words, tables and figures are there without its
script, which draws the curves and makes tables sort and figures zoom.

    article.py    an experiment            solution.py   a solved equation
    charts.py     curves as data           page.py       the frame
    markup.py     escaped text, tables, figures that were drawn
"""

from __future__ import annotations

import re
import shlex
from itertools import chain, count
from pathlib import Path
from typing import Any

from pullback import PullbackError
from pullback.cli import files
from pullback.cli.record import FORMAT

from ...framework import store
from ...framework.progress import ranges
from .article import article
from .charts import MALFORMED, curves
from .markup import ReportEntry
from .page import page
from .solution import solution

__all__ = ["write", "collect_entries", "ranges"]


def write(out: Path) -> tuple[Path, list[str]]:
    """Write OUT/report.html; its path, and which JSON files were left out and why.

    Where there is nothing to show the page says so, and so does the refusal.
    """
    if not out.is_dir():
        why = "there is no such folder"
        if out.exists():
            why = "it is no folder"
        raise PullbackError(f"There are no results under {out}", why, "Pass the --out of the runs")
    entries, left_out = collect_entries(out)
    path = files.write_text(out / "report.html", page(entries, left_out))
    if not entries:
        why = "; ".join(left_out) or "there is no JSON file"
        remedy = f"Run one first: pullback run NAME --out {shlex.quote(str(out))}"
        raise PullbackError(f"There are no results under {out}", why, remedy)
    return path, left_out


def collect_entries(out: Path) -> tuple[list[ReportEntry], list[str]]:
    """Return an entry for every result file, and a line on every other JSON file."""
    entries: list[ReportEntry] = []
    left_out: list[str] = []
    for path in sorted(out.rglob("*.json"), key=lambda p: p.with_suffix("").parts):
        relative_path = path.relative_to(out)
        try:
            entries.append(_entry(path, out, _anchor(relative_path, {e.anchor for e in entries})))
        except PullbackError as error:
            left_out.append(f"{relative_path}: {error.why}")
        except (*MALFORMED, RecursionError) as error:
            left_out.append(f"{relative_path}: incomplete or changed by hand ({error!r})")
    return entries, left_out


def _entry(path: Path, out: Path, anchor: str) -> ReportEntry:
    state: dict[str, Any] = store.read_json(path)
    if state.get("format") == FORMAT:
        return solution(path, out, state, anchor)
    state = store.read(path)
    return article(path, out, state, anchor, curves(path, state))


def _anchor(relative_path: Path, anchors: set[str]) -> str:
    """The name of the file in letters that an address can have, unique on the page."""
    words = [*relative_path.parts[:-1], relative_path.stem]
    longer = ("-".join(words[-n:]) for n in range(1, len(words) + 1))
    plain = [re.sub(r"[^\w.-]+", "-", one).strip("-") or "result" for one in longer]
    numbered = (f"{plain[-1]}-{number}" for number in count(2))
    return next(one for one in chain(plain, numbered) if one not in anchors)
