"""One experiment on the page."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...framework.check import BESIDE, UNJUDGED
from ...framework.progress import format_duration, ranges
from . import charts
from .charts import Curves
from .markup import (
    VERDICTS,
    ReportEntry,
    badge,
    command,
    environments,
    lines,
    render_details,
    render_figures,
    render_json,
    table,
    text,
)


def article(
    path: Path, out: Path, state: Mapping[str, Any], anchor: str, curves: Curves
) -> ReportEntry:
    """Return the entry of a results file."""
    about = state["about"]
    summary = state["summary"]
    verdict = read_verdict(summary)
    seeds = _describe_seeds(about, summary)
    title = "Environment and configuration, " + str(path.relative_to(out))
    details = environments(state["environments"]) + render_json(state["config"])
    blocks = [
        _heading(anchor, str(about["name"]), about, verdict),
        f'<p class="claim">{text(about.get("claim", ""))}</p>',
        _why(summary),
        seeds.html,
        _checks(summary.get("checks") or []),
        *_illustrations(path, about, summary, curves),
        _paragraph("about", about.get("about")),
        command(_make_command(path, about, summary)),
        render_details(title, details),
    ]
    html = f'<article id="{text(anchor)}" data-verdict="{verdict}">\n{lines(blocks)}\n</article>'
    took = summary.get("seconds")
    if took is not None:
        took = float(took)
    return ReportEntry(
        anchor=anchor,
        paper=str(about.get("paper") or "Other"),
        name=_name(about),
        figure=str(about.get("figure", "")),
        verdict=verdict,
        claims=_count_claims(summary.get("checks") or []),
        seeds=seeds.short,
        took=took,
        html=html,
    )


def _name(about: Mapping[str, Any]) -> str:
    if about.get("quick"):
        return f"{about['name']} (quick)"
    return str(about["name"])


def _count_claims(checks: Sequence[Mapping[str, Any]]) -> str:
    """Return how many of the paper's claims hold, such as 3/4."""
    of_paper = [check for check in checks if check.get("of_paper", True)]
    if not of_paper:
        return "–"
    holding = sum(bool(check["holds"]) for check in of_paper)
    return f"{holding}/{len(of_paper)}"


def _paragraph(css_class: str, words: object) -> str:
    """Return a paragraph, or nothing without words."""
    if not words:
        return ""
    return f'<p class="{css_class}">{text(words)}</p>'


def _illustrations(
    path: Path, about: Mapping[str, Any], summary: Mapping[str, Any], curves: Curves
) -> list[str]:
    """Return curves, figures and tables."""
    plots = charts.render_charts(curves.charts)
    hint = ""
    if plots:
        hint = "<noscript><p>The curves are drawn by a script.</p></noscript>"
    figures = summary.get("figures") or []
    return [
        plots,
        hint,
        _paragraph("note", curves.note),
        render_figures(path, figures, str(about["name"]), bool(plots)),
        *map(table, summary.get("tables") or []),
    ]


def read_verdict(summary: Mapping[str, Any]) -> str:
    """Return the verdict of a run; "not judged" without one that this version knows."""
    verdict = summary.get("verdict")
    if verdict is None or str(verdict["outcome"]) not in VERDICTS:
        return "not judged"
    return str(verdict["outcome"])


def _heading(anchor: str, name: str, about: Mapping[str, Any], verdict: str) -> str:
    link = f'<a class="anchor" href="#{text(anchor)}">{text(name)}</a>'
    size = ""
    if about.get("quick"):
        size = ' <span class="badge none">quick</span>'
    figure = f"<small>{text(about.get('figure', ''))}</small>"
    return f"<h3>{link} {figure} {badge(verdict)}{size}</h3>"


def _why(summary: Mapping[str, Any]) -> str:
    """Return the reason of the verdict; claims that do not hold are among the checks below."""
    verdict = summary.get("verdict")
    if verdict is None:
        if summary.get("complete") and not summary.get("checks"):
            return _paragraph("why", UNJUDGED)
        return ""
    why = str(verdict["why"])
    if summary.get("checks"):
        why = why.partition("; not: ")[0]
    return f'<p class="why">{text(why[:1].upper() + why[1:])}.</p>'


@dataclass(frozen=True)
class SeedsInWords:
    """Which seeds are complete: a sentence, a few words, and whether some are missing."""

    sentence: str
    complete: list[int]
    is_partial: bool

    @property
    def html(self) -> str:
        """The sentence as a paragraph."""
        css_class = "seeds"
        if self.is_partial:
            css_class = "seeds partial"
        return f'<p class="{css_class}">{text(self.sentence)}.</p>'

    @property
    def short(self) -> str:
        """The complete seeds, such as "0-9, partial"."""
        seeds = ranges(self.complete) or "none"
        if self.is_partial:
            return f"{seeds}, partial"
        return seeds


def _describe_seeds(about: Mapping[str, Any], summary: Mapping[str, Any]) -> SeedsInWords:
    complete = _integers(summary.get("complete"))
    beside = _integers(summary.get("beside"))
    expected = set(_integers(about.get("seeds")))
    missing = expected - set(complete) - set(beside)
    finished, total = summary.get("items") or (0, None)
    is_finished = total is not None and finished >= total
    clauses = [f"Seeds: {ranges(complete) or 'none complete'}"]
    if missing:
        count = f"{len(missing)} of {len(expected)}"
        clauses.append(f"partial, {count} are missing ({ranges(sorted(missing))})")
    if total is None:
        clauses.append("interrupted before anything was judged")
    elif not is_finished:
        clauses.append(f"unfinished, {int(finished)} of {int(total)} items")
    took = summary.get("seconds")
    if took is not None:
        clauses.append(f"{format_duration(float(took))} in all")
    sentence = "; ".join(clauses)
    if beside:
        sentence += f". {BESIDE.format(ranges(beside))}; the command below takes them in"
    is_partial = not is_finished or not expected <= set(complete)
    return SeedsInWords(sentence, complete, is_partial)


def _integers(numbers: Iterable[Any] | None) -> list[int]:
    return [int(number) for number in numbers or ()]


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    """Return a list of the checks, or nothing without any."""
    if not checks:
        return ""
    return f'<ul class="checks">\n{lines(list(map(_check, checks)))}\n</ul>'


def _check(check: Mapping[str, Any]) -> str:
    css_class = "no"
    mark = "✗"
    word = "does not hold"
    if check["holds"]:
        css_class = "yes"
        mark = "✓"
        word = "holds"
    notes = ""
    if check["holds"] != check["recorded"]:
        notes += " <em>unlike the record</em>"
    if not check.get("of_paper", True):
        notes += " <em>" + text("not the paper's") + "</em>"
    return (
        f'<li class="{css_class}"><span title="{word}" role="img" '
        f'aria-label="{word}">{mark}</span> {text(check["claim"])} '
        f"<small>{text(check['numbers'])}</small>{notes}</li>"
    )


def _make_command(path: Path, about: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return the command that goes on with the run, or repeats it."""
    words = ["pullback", "run", str(about["name"])]
    if about.get("quick"):
        words.append("--quick")
    seeds = sorted(_integers(summary.get("asked")) + _integers(summary.get("beside")))
    if seeds and seeds != sorted(_integers(about.get("seeds"))):
        words += ["--seeds", ranges(seeds)]
    device = str(summary.get("device", "cpu"))
    if device != "cpu":
        words += ["--device", device]
    return shlex.join([*words, "--out", str(path.parent)])
