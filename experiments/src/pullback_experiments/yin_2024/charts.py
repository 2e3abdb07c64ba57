"""Loss and error of each group of methods, against steps or seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.curves import Chart, over_seeds
from ..framework.results import Results

if TYPE_CHECKING:
    from .experiment import Comparison

_MEASURES = {"loss": "loss", "error": "relative L² error"}
_ALONG = {"steps": "steps", "seconds": "CPU seconds"}


def charts(experiment: Comparison, results: Results) -> list[Chart]:
    """A pair for each group."""
    return [
        Chart(
            group,
            name,
            [
                # which lies upon the search that it varies
                over_seeds(
                    method,
                    results.of(method),
                    measure,
                    _ALONG,
                    style="dashed" if "arg-min" in method else "solid",
                )
                for method in methods
            ],
            x=_ALONG,
            note="medians and quartiles over seeds",
        )
        for group, methods in experiment.groups.items()
        for measure, name in _MEASURES.items()
    ]
