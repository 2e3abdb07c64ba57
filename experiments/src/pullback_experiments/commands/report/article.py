"""One experiment on the page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...framework.check import BESIDE, UNJUDGED
from ...framework.progress import clocked, ranges
from . import charts
from .charts import Curves
from .markup import (
    VERDICTS,
    ReportEntry,
    badge,
    command,
    environments,
    folded,
    lines,
    listing,
    pictures,
    table,
    text,
)


def article(
    path: Path, out: Path, state: Mapping[str, Any], anchor: str, curves: Curves
) -> ReportEntry:
    """The entry of a results file."""
    about = state["about"]
    summary = state["summary"]
    checks = summary.get("checks") or []
    figures = summary.get("figures") or []
    name = str(about["name"])
    plots = charts.drawn(curves.charts)
    took = summary.get("seconds")
    verdict = judged(summary)
    words, partial = _seeds(about, summary)
    parts = [
        _heading(anchor, name, about, verdict),
        f'<p class="claim">{text(about.get("claim", ""))}</p>',
        _why(summary),
        f'<p class="seeds{" partial" if partial else ""}">{text(words)}.</p>',
        _checks(checks),
        plots,
        "<noscript><p>The curves are drawn by a script.</p></noscript>" if plots else "",
        f'<p class="note">{text(curves.note)}</p>' if curves.note else "",
        pictures(path, figures, name, bool(plots)),
        *(table(one) for one in summary.get("tables") or []),
        f'<p class="about">{text(about["about"])}</p>' if about.get("about") else "",
        command(_again(path, about, summary)),
        folded(
            f"Environment and configuration, {path.relative_to(out)}",
            environments(state["environments"]) + listing(state["config"]),
        ),
    ]
    asked = [c for c in checks if c.get("of_paper", True)]
    held = sum(bool(c["holds"]) for c in asked)
    complete = [int(s) for s in summary.get("complete") or []]
    return ReportEntry(
        anchor=anchor,
        paper=str(about.get("paper") or "Other"),
        name=name + (" (quick)" if about.get("quick") else ""),
        figure=str(about.get("figure", "")),
        verdict=verdict,
        claims=f"{held}/{len(asked)}" if asked else "–",
        seeds=(ranges(complete) or "none") + (", partial" if partial else ""),
        took=None if took is None else float(took),
        html=f'<article id="{text(anchor)}" data-verdict="{verdict}">\n{lines(parts)}\n</article>',
    )


def judged(summary: Mapping[str, Any]) -> str:
    """The verdict of a run; words of others are none."""
    verdict = summary.get("verdict")
    if verdict is None:
        word = "not judged"
    else:
        word = str(verdict["outcome"])
    return word if word in VERDICTS else "not judged"


def _heading(anchor: str, name: str, about: Mapping[str, Any], verdict: str) -> str:
    link = f'<a class="anchor" href="#{text(anchor)}">{text(name)}</a>'
    size = ' <span class="badge none">quick</span>' if about.get("quick") else ""
    figure = f"<small>{text(about.get('figure', ''))}</small>"
    return f"<h3>{link} {figure} {badge(verdict)}{size}</h3>"


def _why(summary: Mapping[str, Any]) -> str:
    """The reason of the verdict; claims that do not hold are among the checks below."""
    verdict = summary.get("verdict")
    if verdict is None:
        silent = summary.get("complete") and not summary.get("checks")
        if silent:
            return f'<p class="why">{text(UNJUDGED)}</p>'
        return ""
    why = str(verdict["why"])
    if summary.get("checks"):
        why = why.partition("; not: ")[0]
    return f'<p class="why">{text(why[:1].upper() + why[1:])}.</p>'


def _seeds(about: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, bool]:
    """Which seeds are in, in words, and whether some are missing."""
    complete = [int(s) for s in summary.get("complete") or []]
    due = {int(s) for s in about.get("seeds") or []}
    done, total = summary.get("items") or (0, None)
    words = f"Seeds: {ranges(complete) or 'none complete'}"
    partial = True
    beside = _beside(summary)
    if missing := due - set(complete) - set(beside):
        words += f"; partial, {len(missing)} of {len(due)} are missing ({ranges(sorted(missing))})"
    if total is None:
        words += "; interrupted before anything was judged"
    elif done < total:
        words += f"; unfinished, {int(done)} of {int(total)} items"
    else:
        partial = not due <= set(complete)
    took = summary.get("seconds")
    words += "" if took is None else f"; {clocked(float(took))} in all"
    if beside:
        words += f". {BESIDE.format(ranges(beside))}; the command below takes them in"
    return words, partial


def _beside(summary: Mapping[str, Any]) -> list[int]:
    return [int(s) for s in summary.get("beside") or []]


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for check in checks:
        mark, word = ("✓", "holds") if check["holds"] else ("✗", "does not hold")
        if check["holds"] == check["recorded"]:
            notes = []
        else:
            notes = ["unlike the record"]
        notes += [] if check.get("of_paper", True) else ["not the paper's"]
        extra = "".join(f" <em>{text(note)}</em>" for note in notes)
        rows.append(
            f'<li class="{"yes" if check["holds"] else "no"}"><span title="{word}" role="img" '
            f'aria-label="{word}">{mark}</span> {text(check["claim"])} '
            f"<small>{text(check['numbers'])}</small>{extra}</li>"
        )
    if rows:
        return f'<ul class="checks">\n{lines(rows)}\n</ul>'
    return ""


def _again(path: Path, about: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    words = ["pullback", "run", str(about["name"]), *(["--quick"] if about.get("quick") else [])]
    asked = sorted([*(int(s) for s in summary.get("asked") or []), *_beside(summary)])
    if asked and asked != sorted(int(s) for s in about.get("seeds") or []):
        words += ["--seeds", ranges(asked)]
    if (device := str(summary.get("device", "cpu"))) != "cpu":
        words += ["--device", device]
    return shlex.join([*words, "--out", str(path.parent)])
