"""Pieces of HTML. Every text that comes from a file goes through `text`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

#: verdicts with their mark and class
VERDICTS = {
    "reproduced": ("✓", "good"),
    "differs": ("≠", "mixed"),
    "not reproduced": ("✗", "bad"),
    "not judged": ("–", "none"),
}


@dataclass(frozen=True)
class ReportEntry:
    """A part of the page, and what the overview says of it; all but `html` are texts.

    Attributes:
        anchor: its address on the page, unique.
        paper: whose part it is.
        name, figure: what it is, and of what.
        verdict: a key of `VERDICTS`.
        claims: how many hold.
        seeds: that are complete.
        took: seconds in all.
        html: the part itself.
    """

    anchor: str
    paper: str
    name: str
    figure: str
    verdict: str
    claims: str
    seeds: str
    took: float | None
    html: str


def text(value: object) -> str:
    """Any value as escaped text, fit for attributes in quotes too.

    >>> text('<b> & "c"')
    '&lt;b&gt; &amp; &quot;c&quot;'
    """
    return escape(str(value), quote=True)


def lines(blocks: Iterable[str]) -> str:
    """Return the parts that are not empty, one per line."""
    return "\n".join(block for block in blocks if block)


def badge(verdict: str) -> str:
    """Return a verdict with a mark besides its color."""
    mark, css_class = VERDICTS[verdict]
    return (
        f'<span class="badge {css_class}"><span aria-hidden="true">{mark}</span> {verdict}</span>'
    )


def table(content: Mapping[str, Any]) -> str:
    """A table of `Table.as_dict`; the script makes its headings sort."""
    flush = int(content.get("text", 1))

    def css_class(column: int) -> str:
        if column < flush:
            return ""
        return ' class="number"'

    columns = list(content["columns"])
    head = "".join(f'<th scope="col"{css_class(i)}>{text(c)}</th>' for i, c in enumerate(columns))
    rows = []
    for row in content["rows"]:
        cells = [f"<td{css_class(i)}>{text(cell)}</td>" for i, cell in enumerate(row)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    title = text(content.get("title") or "")
    if title:
        caption = f"<caption>{title}</caption>"
    else:
        caption = ""
    inside = f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    label = title or "Table"
    return f'<div class="wide" tabindex="0" role="region" aria-label="{label}">{inside}</div>'


def command(words: str) -> str:
    """Return the command that repeats the experiment."""
    return f'<pre class="command"><code>{text(words)}</code></pre>'


def environments(records: Sequence[Mapping[str, Any]]) -> str:
    """Names and values, one list for each environment."""
    out = []
    for one in records:
        items = "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in one.items())
        out.append(f"<dl>{items}</dl>")
    return lines(out)


def render_details(summary: str, inside: str) -> str:
    """Return an element that opens and closes; the summary is a text."""
    return f"<details><summary>{text(summary)}</summary>{inside}</details>"


def render_json(value: object) -> str:
    """Any JSON, indented."""
    return f"<pre>{text(json.dumps(value, indent=1, ensure_ascii=False))}</pre>"


_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


def find_figures(path: Path, figures: Sequence[str]) -> list[Path]:
    """One file of every figure that lies beside the results: SVG unless it is huge."""
    largest = 1_500_000  # bytes of an SVG, above which the PNG is shown
    files: dict[str, Path] = {}
    for suffix in _KINDS:
        for name in map(str, figures):
            file = path.with_name(Path(name).name)  # never outside of the folder
            if file.suffix != suffix or file.is_symlink() or not file.is_file():
                continue
            if suffix == ".png" or file.stat().st_size <= largest:
                files.setdefault(file.stem, file)
    return list(files.values())


def render_figures(path: Path, figures: Sequence[str], name: str, beside: bool) -> str:
    """The figures; to be folded by the script where curves stand `beside` them."""
    files = find_figures(path, figures)
    if not files:
        if not figures:
            return ""
        words = "The run's figures are not beside its results; the command below draws them again."
        return f'<p class="note">{words}</p>'
    inside = lines(_figure(path, file, name) for file in files)
    if not beside:
        return inside
    return (
        f"<details open data-folded><summary>Figure as drawn by the run</summary>{inside}</details>"
    )


def _figure(path: Path, file: Path, name: str) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    panel = file.stem.removeprefix(path.stem).strip("-")
    words = text(f"Figure of {name}")
    if panel:
        words = text(f"Figure of {name}, {panel}")
    image = f'<img alt="{words}" src="data:{_KINDS[file.suffix]};base64,{data}">'
    return f'<figure data-zoom aria-label="{words}">{image}</figure>'
