"""Models that others wrote: what a step costs, and how they train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .numbers import Rows, record, times

NAMES = ("SGD", "Adam", "KFAC")


def models() -> Rows:
    """Small configurations on a CPU: the cost of a default step, and losses after 30 steps."""
    rows = [["model", "a step", *NAMES[:2], f"`{NAMES[2]}`"]]
    for model, one in record("third-party")["results"].items():
        if one["refused"]:
            rows.append([model, one["refused"], *["–"] * 3])
            continue
        rows.append([model, times(one["ratio"]["default"]), *_losses(one)])
    return rows


def _losses(one: Mapping[str, Any]) -> list[str]:
    """The losses at the best rates, the lowest in bold."""
    scores = [_best(one["scores"][name]) for name in NAMES]
    shown = [f"{s:.3f}" if s >= 5e-4 else "0" for s in scores]
    return [f"**{t}**" if s == min(scores) else t for t, s in zip(shown, scores, strict=True)]


def _best(scores: Mapping[str, float | None]) -> float:
    return min(score for score in scores.values() if score is not None)
