"""What the experiments found."""

from __future__ import annotations

import json
import re
from typing import Any

from .numbers import RESULTS, Rows, record


def experiments() -> list[tuple[str, dict[str, Any]]]:
    """(name, record) of every experiment with a record, in order of names."""
    records = ((path.stem, json.loads(path.read_text("utf-8"))) for path in RESULTS.glob("*.json"))
    return sorted((name, one) for name, one in records if "about" in one)


def seeds(one: dict[str, Any]) -> str:
    complete = one["summary"].get("complete")
    asked = one["summary"].get("asked")
    if not asked:
        return "–"
    if complete == asked:
        return str(len(asked))
    return f"{len(complete or [])} of {len(asked)}"


def outcome(one: dict[str, Any]) -> str:
    if not one["summary"]:
        return "unfinished"
    verdict = one["summary"]["verdict"]
    if verdict:
        return verdict["outcome"]
    return "no claim of the paper"


def count_claims(one: dict[str, Any]) -> str:
    """Return how many of the paper's claims hold, or of ours where it has none."""
    checks = one["summary"].get("checks", [])
    theirs = [c for c in checks if c["of_paper"]]
    said = f"{sum(c['holds'] for c in theirs or checks)} of {len(theirs or checks)}"
    if not checks:
        return "–"
    if theirs:
        return said
    return f"{said}, ours"


def verdicts() -> Rows:
    """Return for each experiment whether the paper's claims hold, and on how many seeds."""
    rows = [["experiment", "found", "claims that hold", "seeds"]]
    for name, one in experiments():
        if any(check["of_paper"] for check in one["summary"].get("checks", [])):
            rows.append([f"`{name}`", outcome(one), count_claims(one), seeds(one)])
    return rows


def copy_first_table(name: str) -> Rows:
    """The first table of an experiment's own record."""
    table = record(name)["summary"]["tables"][0]
    return [table["columns"], *(list(map(_cell, row)) for row in table["rows"])]


def _cell(value: str | None) -> str:
    if value is None:
        return "–"
    return re.sub(r"e([+-])0*(?=\d)", lambda m: "e" + m[1].strip("+"), value)
