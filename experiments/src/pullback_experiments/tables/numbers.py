"""Records, and how their numbers are written."""

from __future__ import annotations

import json
from typing import Any

from ..framework.checkout import RESULTS

Rows = list[list[str]]


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def times(value: float | None) -> str:
    """A ratio in two or three digits: 1.57×, 9.9×, 126×."""
    if value is None:
        return "–"
    if value < 2:
        return f"{value:.2f}×"
    if value < 10:
        return f"{value:.1f}×"
    return f"{value:.0f}×"


def size(count: float) -> str:
    if count < 1e6:
        return f"{count:,.0f}"
    return f"{count / 1e6:.1f}M"


def memory(count: float) -> str:
    unit = "GiB"
    scale = 2**30
    if count >= 2**40:
        unit = "TiB"
        scale = 2**40
    digits = 0
    if count < 20 * scale:
        digits = 1
    return f"{count / scale:.{digits}f} {unit}"


def seconds(value: float) -> str:
    if value < 10:
        return f"{value:.1f}"
    return f"{value:.0f}"


def small(value: float | None, digits: int = 1) -> str:
    """Return 1.2e-7 rather than 1.2e-07; a dash for None."""
    if value is None:
        return "–"
    mantissa, _, power = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(power)}"
