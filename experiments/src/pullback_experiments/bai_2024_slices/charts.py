"""Accuracies and losses over a run, and what is left of a loss after a rescaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..framework.curves import Chart, Line, Series, Style, averages
from ..framework.plain import Record
from ..framework.quantiles import finite, quantiles
from .methods import ADAM, FIRST, POLAR, SECOND, SGD, SLICED, START, UNITS
from .rescaled_checks import Ends
from .rescaled_methods import METHODS

ROWS: Mapping[str, tuple[str, ...]] = {
    "the paper's": (SGD, FIRST, SECOND),
    "beside them": (SGD, START, FIRST, UNITS, POLAR),
    "Adam": (SGD, ADAM, SLICED),
}
#: their places in the palette
ORDER = (SGD, FIRST, SECOND, UNITS, POLAR, ADAM, SLICED, START)
_STYLES: Mapping[str, Style] = {START: "dashed", UNITS: "dotted"}
_ALONG = {"epoch": "epochs", "seconds": "seconds of training", "step": "steps"}


def training(found: Mapping[str, Sequence[Record]]) -> list[Chart]:
    """Test accuracy and training loss of each group of methods."""
    return [
        Chart(
            f"{title}: {group}",
            title.lower(),
            [_series(name, found[name], what) for name in names],
            x=_ALONG,
            logx=False,
            logy=what == "train loss",
            note="means over seeds ± standard deviation",
        )
        for group, names in ROWS.items()
        for what, title in (("test accuracy", "Test accuracy"), ("train loss", "Training loss"))
    ]


def _series(name: str, runs: Sequence[Record], what: str) -> Series | None:
    if not runs:
        return None
    lines = {key: averages([r[key] for r in runs], [r[what] for r in runs]) for key in _ALONG}
    return Series(name, lines, ORDER.index(name), _STYLES.get(name, "solid"))


def rescaled(found: Ends) -> list[Chart]:
    """The final loss against the size; a method and the same on the slice share a color."""
    return [
        Chart(
            start.capitalize().replace("mlp", "MLP"),
            "training loss",
            [
                _ends(m.name, methods[m.name], i % 4, "solid" if m.sliced else "dashed")
                for i, m in enumerate(METHODS)
            ],
            x={"size": "size s of the rescaling by 10^±s"},
            logx=False,
            note="medians and range over seeds; solid: on a slice; lost runs are left out",
        )
        for start, methods in found.items()
    ]


def _ends(
    name: str, by_size: Mapping[int, Sequence[Record]], color: int, style: Style
) -> Series | None:
    ends = {s: [finite(r["train loss"][-1]) for r in runs] for s, runs in by_size.items() if runs}
    if not ends:
        return None
    middle = [quantiles(e)[1] for e in ends.values()]
    low, high = [min(e) for e in ends.values()], [max(e) for e in ends.values()]
    return Series(name, {"size": Line(list(ends), middle, low, high)}, color, style)
