"""One page on all results under a folder: claims, verdicts, figures, tables, environments."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..._core.errors import PullbackError
from ..framework import files, store
from ..framework.progress import clocked
from .page import page

_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
_LARGEST = 1_500_000  # bytes of an SVG, above which the PNG is shown


def write(out: Path) -> tuple[Path, list[str]]:
    """Write OUT/report.html; its path, and which JSON files were left out and why."""
    if not out.is_dir():
        raise PullbackError(
            f"There are no results under {out}", "it is no folder", "Pass the --out of the runs"
        )
    papers, left_out = gathered(out)
    if not papers:
        why = "; ".join(left_out) or "there is no JSON file"
        remedy = f"Run one first: pullback run NAME --out {shlex.quote(str(out))}"
        raise PullbackError(f"There are no results under {out}", why, remedy)
    return files.write_text(out / "report.html", page(papers, left_out)), left_out


def gathered(out: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The sections of the page by paper, and the files that are none of ours."""
    papers: dict[str, list[str]] = {}
    left_out: list[str] = []
    for path in sorted(out.rglob("*.json")):
        try:
            state = store.read(path)
            section = _section(path, out, state)
        except PullbackError as error:
            left_out.append(f"{path.relative_to(out)}: {error.why}")
            continue
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            left_out.append(f"{path.relative_to(out)}: changed by hand ({error!r})")
            continue
        papers.setdefault(str(state["about"].get("paper") or "Other"), []).append(section)
    return papers, left_out


def _section(path: Path, out: Path, state: Mapping[str, Any]) -> str:
    """One experiment."""
    about, summary = state["about"], state["summary"]
    name = str(about["name"]) + (" (quick)" if about.get("quick") else "")
    parts = [
        f"<h3>{escape(name)} <small>{escape(str(about.get('figure', '')))}</small>"
        f"{_badge(summary)}</h3>",
        f"<p class=claim>{escape(str(about.get('claim', '')))}</p>",
        _why(summary),
        _seeds(about, summary),
        _checks(summary.get("checks", [])),
        *(_figure(path, file, name) for file in _shown(path, summary.get("figures", []))),
        *(_table(table) for table in summary.get("tables", [])),
        f"<p>{escape(str(about['about']))}</p>" if about.get("about") else "",
        f"<pre><code>{escape(_command(path, about, summary))}</code></pre>",
        _surroundings(path, out, state),
    ]
    return f"<article id={_anchor(path)}>\n{_lines(parts)}\n</article>"


def _lines(parts: Iterable[str]) -> str:
    return "\n".join(part for part in parts if part)


def _anchor(path: Path) -> str:
    return '"' + escape(path.stem.replace(" ", "-"), quote=True) + '"'


def _badge(summary: Mapping[str, Any]) -> str:
    verdict = summary.get("verdict")
    word = "not judged" if verdict is None else str(verdict["outcome"])
    kind = {"reproduced": "good", "differs": "mixed", "not reproduced": "bad"}.get(word, "none")
    return f' <span class="badge {kind}">{escape(word)}</span>'


def _why(summary: Mapping[str, Any]) -> str:
    verdict = summary.get("verdict")
    return "" if verdict is None else f"<p>{escape(str(verdict['why']))}</p>"


def _seeds(about: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Which seeds are in, and whether that is all of them."""
    complete = [int(s) for s in summary.get("complete", [])]
    due = {int(s) for s in about.get("seeds", [])}
    done, total = summary.get("items") or (0, None)
    words = f"Seeds: {ranges(complete) or 'none complete'}"
    if missing := due - set(complete):
        words += f"; partial, {len(missing)} of {len(due)} are missing ({ranges(sorted(missing))})"
    if total is None:
        words += "; interrupted before anything was judged"
    elif done < total:
        words += f"; unfinished, {int(done)} of {int(total)} items"
    took = summary.get("seconds")
    return f"<p>{escape(words)}{'' if took is None else f'; {clocked(float(took))} in all'}.</p>"


def ranges(seeds: Sequence[int]) -> str:
    """Seeds as people write them.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    out: list[list[int]] = []
    for seed in sorted(seeds):
        if out and seed == out[-1][-1] + 1:
            out[-1][1:] = [seed]
        else:
            out.append([seed])
    return ",".join("-".join(map(str, ends)) for ends in out)


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for check in checks:
        mark, word = ("✓", "holds") if check["holds"] else ("✗", "does not hold")
        notes = [] if check["holds"] == check["recorded"] else ["unlike the record"]
        notes += [] if check.get("of_paper", True) else ["not the paper's"]
        extra = "".join(f" <em>{note}</em>" for note in notes)
        rows.append(
            f'<li class={"yes" if check["holds"] else "no"}><span title="{word}" role=img '
            f'aria-label="{word}">{mark}</span> {escape(str(check["claim"]))} '
            f"<small>{escape(str(check['numbers']))}</small>{extra}</li>"
        )
    return f"<ul class=checks>\n{_lines(rows)}\n</ul>" if rows else ""


def _shown(path: Path, figures: Sequence[str]) -> list[Path]:
    """One file of every figure that lies beside the results: SVG unless it is huge."""
    found: dict[str, Path] = {}
    for kind in _KINDS:
        for name in map(str, figures):
            file = path.with_name(Path(name).name)  # never outside of the folder
            if file.suffix != kind or not file.is_file():
                continue
            if kind == ".png" or file.stat().st_size <= _LARGEST:
                found.setdefault(file.stem, file)
    return list(found.values())


def _figure(path: Path, file: Path, name: str) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    part = file.stem.removeprefix(path.stem).strip("-")
    words = escape(f"Figure of {name}{f', {part}' if part else ''}", quote=True)
    image = f'<img alt="{words}" src="data:{_KINDS[file.suffix]};base64,{data}">'
    return f'<figure tabindex=0 aria-label="{words}">{image}</figure>'


def _table(table: Mapping[str, Any]) -> str:
    text = int(table.get("text", 1))
    head = "".join(
        f"<th{'' if i < text else ' class=number'}><button>{escape(str(c))}</button></th>"
        for i, c in enumerate(table["columns"])
    )
    rows = [
        "".join(
            f"<td{'' if i < text else ' class=number'}>{escape(str(cell))}</td>"
            for i, cell in enumerate(row)
        )
        for row in table["rows"]
    ]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    title = f"<caption>{escape(str(table['title']))}</caption>" if table.get("title") else ""
    inside = f"<table>{title}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f"<div class=wide tabindex=0>{inside}</div>"


def _command(path: Path, about: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    words = ["pullback", "run", str(about["name"]), *(["--quick"] if about.get("quick") else [])]
    asked = [int(s) for s in summary.get("asked", [])]
    if asked and asked != [int(s) for s in about.get("seeds", [])]:
        words += ["--seeds", ranges(asked)]
    if (device := str(summary.get("device", "cpu"))) != "cpu":
        words += ["--device", device]
    return shlex.join([*words, "--out", str(path.parent)])


def _surroundings(path: Path, out: Path, state: Mapping[str, Any]) -> str:
    """Environments and configuration, folded away."""
    blocks = [json.dumps(e, indent=1, ensure_ascii=False) for e in state["environments"]]
    config = json.dumps(state["config"], indent=1, ensure_ascii=False)
    inside = "".join(f"<pre>{escape(block)}</pre>" for block in blocks)
    inside += f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>"
    where = escape(str(path.relative_to(out)))
    return f"<details><summary>Environment and configuration, {where}</summary>{inside}</details>"
