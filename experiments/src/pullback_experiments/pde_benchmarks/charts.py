"""The errors of every problem, against seconds or steps."""

from __future__ import annotations

from collections.abc import Mapping

from ..framework.curves import Chart, over_seeds
from .checks import Found

_ALONG = {"seconds": "seconds of steps", "step": "steps"}


def charts(found: Found, targets: Mapping[str, float]) -> list[Chart]:
    """One for each."""
    return [
        Chart(
            problem,
            "relative L² error",
            [over_seeds(method, runs, "error", _ALONG) for method, runs in by.items()],
            x=_ALONG,
            note=f"others report {targets[problem]:.1e}" if problem in targets else "",
        )
        for problem, by in found.items()
    ]
