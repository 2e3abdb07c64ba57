"""Losses and accuracies against epochs, steps or seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..framework.curves import Chart, over_seeds
from ..framework.plain import Record
from ..framework.results import Results
from .tuned_checks import OWN, SHARED, runs_of

_ALONG = {"epoch": "epochs", "seconds": "seconds of training", "step": "steps"}
_NAMES = {
    "train loss": "training loss",
    "test loss": "test loss",
    "train accuracy": "training accuracy",
    "test accuracy": "test accuracy",
}


def charts(found: Mapping[str, Sequence[Record]], title: str = "") -> list[Chart]:
    """One for each measure."""
    measures = ("train loss", "test loss", "train accuracy", "test accuracy")
    return [_chart(found, measure, title) for measure in measures]


def tuned(results: Results, nets: Sequence[str], methods: Sequence[str]) -> list[Chart]:
    """For each network: training loss and test accuracy, at K-FAC's settings and at their own."""
    words = {SHARED: "all at K-FAC's settings", OWN: "each at its own settings"}
    return [
        _chart({m: runs_of(results, net, m, s) for m in methods}, measure, f"{net}, {words[s]}")
        for net in nets
        for measure in ("train loss", "test accuracy")
        for s in (SHARED, OWN)
    ]


def _chart(found: Mapping[str, Sequence[Record]], measure: str, title: str) -> Chart:
    return Chart(
        title or _NAMES[measure].capitalize(),
        _NAMES[measure],
        [over_seeds(name, runs, measure, _ALONG) for name, runs in found.items()],
        x=_ALONG,
        logx=False,
        logy="loss" in measure,
        note="medians and quartiles over seeds",
    )
