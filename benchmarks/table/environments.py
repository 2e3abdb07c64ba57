"""Where each record comes from, and when it was made."""

from __future__ import annotations

import json
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

from .numbers import RESULTS, Rows


def environments() -> Rows:
    """Where each record comes from."""
    rows = [["record", "date", "environment"]]
    for path in sorted(RESULTS.glob("*.json")):
        one = json.loads(path.read_text("utf-8"))
        if "environment" in one:
            told = [one["environment"].replace("1 CPU threads", "1 CPU thread")]
        else:
            told = [environment(each) for each in one["environments"]]
        rows.append([f"`{path.stem}`", date(path), "; ".join(dict.fromkeys(told))])
    return rows


def environment(one: dict[str, Any]) -> str:
    if one["device"] == "cpu":
        device = "CPU"
    else:
        device = one["device"]
    plural = "" if one["threads"] == 1 else "s"
    return f"torch {one['torch']}, {device}, {one['threads']} CPU thread{plural}"


def date(path: Path) -> str:
    """The day on which a record was last changed."""
    command = ["git", "log", "-1", "--format=%cs", "--", str(path)]
    found = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    return found.stdout.strip() or f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d}"
