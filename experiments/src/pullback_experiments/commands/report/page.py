"""The frame of the page: one file that needs no network and works without its script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from fractions import Fraction
from importlib import resources
from itertools import chain

import pullback

from ...framework.plots import PALETTE
from ...framework.progress import format_duration
from ...framework.tabular import count_of
from .markup import VERDICTS, ReportEntry, badge, lines, text

#: in the order in which they are joined
STYLES = ("base.css", "article.css", "chart.css", "media.css")
SCRIPTS = (
    "scale.js",
    "drawing.js",
    "chart.js",
    "readout.js",
    "gestures.js",
    "figures.js",
    "tables.js",
    "page.js",
)


def page(entries: Sequence[ReportEntry], left_out: Sequence[str]) -> str:
    """The whole page from entries and notes (texts)."""
    papers: dict[str, list[ReportEntry]] = {}
    for entry in sorted(entries, key=lambda e: e.paper.casefold()):
        papers.setdefault(entry.paper, []).append(entry)
    style = styles()
    script = scripts()
    if entries:
        head = [_filters(papers), _overview(papers)]
    else:
        head = ["", _explain_empty_page(left_out)]
    body = lines(
        [
            *head,
            *(_section(paper, entries_of_paper) for paper, entries_of_paper in papers.items()),
            _left_out(left_out),
        ]
    )
    whole = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">
<title>pullback: experiments</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the experiments</a>
<header>
<p class="brand">pullback</p>
<h1>Experiments</h1>
<p>{text(_summarize_counts(papers))}</p>
<button type="button" class="theme" data-theme-switch hidden>Theme: system</button>
</header>
<main id="main">
{body}
</main>
<footer><p>pullback {text(pullback.__version__)},
<time>{datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}</time></p></footer>
<script>{script}</script>
</body>
</html>
"""
    # half of a pair of surrogates, which JSON may hold, is no text
    return whole.encode("utf-8", "replace").decode()


def styles() -> str:
    """All of the style, with the palette of the figures."""
    colors = "".join(f"--c{i}:{color};" for i, color in enumerate(PALETTE))
    return f":root{{{colors}}}\n" + _read_assets(STYLES)


def scripts() -> str:
    """All of the script, in a scope of its own."""
    return f'(() => {{\n"use strict";\n{_read_assets(SCRIPTS)}}})();\n'


def _read_assets(names: Sequence[str]) -> str:
    folder = resources.files(__package__ or "") / "assets"
    return "".join((folder / name).read_text("utf-8") for name in names)


def _policy(style: str, script: str) -> str:
    """Return the security policy: no other script runs, and nothing is loaded."""

    def hash_source(words: str) -> str:
        digest = hashlib.sha256(words.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    return (
        f"default-src 'none'; img-src data:; style-src {hash_source(style)}; "
        f"script-src {hash_source(script)}; base-uri 'none'; form-action 'none'"
    )


def _summarize_counts(papers: dict[str, list[ReportEntry]]) -> str:
    entries = list(chain.from_iterable(papers.values()))
    if not entries:
        return "No results."
    counts = Counter(entry.verdict for entry in entries)
    phrases = []
    for verdict in VERDICTS:
        count = counts[verdict]
        if verdict == "differs" and count > 1:
            phrases.append(f"{count} differ")
        elif count:
            phrases.append(f"{count} {verdict}")
    return f"{count_of(len(entries), 'result')}: {', '.join(phrases)}."


def _explain_empty_page(left_out: Sequence[str]) -> str:
    why = "there is no JSON file"
    if left_out:
        why = "none of the JSON files holds any"
    return f"<p>There are no results under this folder: {why}. Run an experiment first.</p>"


def _filters(papers: dict[str, list[ReportEntry]]) -> str:
    """Shown by the script."""
    shown_verdicts = {entry.verdict for entry in chain.from_iterable(papers.values())}
    verdicts = "".join(
        f'<button type="button" aria-pressed="true" data-verdict="{v}">{badge(v)}</button>'
        for v in VERDICTS
        if v in shown_verdicts
    )
    options = "".join(f'<option value="{_key(p)}">{text(short(p))}</option>' for p in papers)
    return f"""<form class="filters" role="search" hidden>
<input type="search" placeholder="Search" aria-label="Search names, claims and checks">
<select aria-label="Paper"><option value="">All papers</option>{options}</select>
<div role="group" aria-label="Verdicts shown">{verdicts}</div>
<output aria-live="polite"></output>
</form>"""


def _overview(papers: dict[str, list[ReportEntry]]) -> str:
    rows = []
    for paper, entries in papers.items():
        for e in entries:
            if e.took is None:
                took = "–"
            else:
                took = format_duration(e.took)
            if e.took is None:
                number = ""
            else:
                number = f' data-value="{e.took:g}"'
            if "/" in e.claims:
                share = f' data-value="{float(Fraction(e.claims)):g}"'
            else:
                share = ""
            rows.append(
                f'<tr data-for="{text(e.anchor)}"><td><a href="#{text(e.anchor)}">{text(e.name)}'
                f"</a></td><td>{text(short(paper))}</td><td>{text(e.figure)}</td>"
                f'<td>{badge(e.verdict)}</td><td class="number"{share}>{text(e.claims)}</td>'
                f'<td>{text(e.seeds)}</td><td class="number"{number}>{text(took)}</td></tr>'
            )
    names = ("experiment", "paper", "of", "verdict", "claims", "seeds", "time")
    css_classes = {"claims": " class=number", "time": " class=number"}
    head = "".join(f'<th scope="col"{css_classes.get(n, "")}>{n}</th>' for n in names)
    return (
        '<div class="wide overview" tabindex="0" role="region" aria-label="Overview">'
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{lines(rows)}\n</tbody></table></div>"
    )


def _section(paper: str, entries: Sequence[ReportEntry]) -> str:
    inside = lines(e.html for e in entries)
    return f'<section data-paper="{_key(paper)}">\n<h2>{text(paper)}</h2>\n{inside}\n</section>'


def _left_out(left_out: Sequence[str]) -> str:
    if not left_out:
        return ""
    items = lines(f"<li>{text(line)}</li>" for line in left_out)
    words = "Files under this folder that hold no results of this version of pullback:"
    return f'<section class="left"><h2>Left out</h2>\n<p>{words}</p>\n<ul>{items}</ul></section>'


def short(paper: str) -> str:
    """Authors and year.

    >>> short("Yin (2024), Natural Gradient Descent"), short("Other")
    ('Yin (2024)', 'Other')
    """
    match = re.match(r".*?\(\d{4}\)", paper)
    if match:
        return match.group()
    return paper


def _key(paper: str) -> str:
    return hashlib.sha256(paper.encode("utf-8", "replace")).hexdigest()[:10]
