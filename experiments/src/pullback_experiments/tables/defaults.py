"""How `pde.solve` does by its defaults, and its set-ups on every seed that was tried."""

from __future__ import annotations

import statistics
from typing import Any

from .numbers import Rows, record, small


def pde_defaults() -> Rows:
    """Ready problems with nothing tuned, without those whose error is below 1e-11."""
    rows = [["problem", "error", "`check()` estimates", "verdict"]]
    for one in sorted(record("pde-defaults")["runs"].values(), key=lambda r: r["name"]):
        estimated = one["estimated"]
        if one["error"] < 1e-11:
            continue
        rows.append(
            [
                f"`{one['name']}`",
                small(one["error"]),
                small(estimated, 0),
                one["verdict"] or "–",
            ]
        )
    return rows


def pde_seeds() -> Rows:
    """Set-ups on several seeds: how many are below the target, and all of their errors."""
    by: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(record("pde-seeds")["runs"].values(), key=lambda r: (r["name"], r["seed"])):
        by.setdefault(one["name"], []).append(one)
    rows = [["set-up", "runs", "target", "median", "worst", "missed by seeds"]]
    for name, runs in by.items():
        target = runs[0]["target"]
        errors = [one["error"] for one in runs]
        if len(runs) > 1:
            missed = [f"{r['seed']} ({small(r['error'])})" for r in runs if r["error"] > target]
            cells = [small(statistics.median(errors)), small(max(errors))]
            listed = ", ".join(missed) or "–"
            rows.append([f"`{name}`", str(len(runs)), small(target), *cells, listed])
    return rows
