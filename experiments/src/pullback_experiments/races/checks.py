"""What a race says: ends, and how soon K-FAC's rules are where another optimizer ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ..framework import plots
from ..framework.check import Claim
from ..framework.curves import Series, finite, over_seeds
from ..framework.records import Record
from ..framework.tabular import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: records over seeds, by optimizer; runs of ours with fewer steps are called "ours, 0.85"
Found = Mapping[str, Sequence[Record]]


@dataclass(frozen=True)
class Lead:
    """A claim: ours end below a rival by so much, or reach its end in such shares.

    Attributes:
        rival: whose final held-out loss it is about.
        below: nats.
        steps, seconds: shares of the rival's.
    """

    rival: str
    below: float | None = None
    steps: float | None = None
    seconds: float | None = None

    def judged(self, found: Found, ours: Sequence[str]) -> list[Claim]:
        """(claim, holds, numbers) of all that it says."""
        level = final(found[self.rival])
        out = []
        if self.below is not None:
            name = min((n for n in ours if n in found), key=lambda n: final(found[n]), default=None)
            if name is None:
                end = math.inf
            else:
                end = final(found[name])
            claim = f"K-FAC's rules end {self.below:g} below {title(self.rival)}"
            if name is None:
                best = "none"
            else:
                best = title(name)
            out.append((claim, end <= level - self.below, f"{end:.4f} ({best}) and {level:.4f}"))
        for along, share in (("step", self.steps), ("seconds", self.seconds)):
            if share is not None:
                theirs = median(r[along][-1] for r in found[self.rival])
                own = min((reached(r, level, along) for r in _own(found, ours)), default=math.inf)
                unit = along.rstrip("s") + "s"
                if share != 1:
                    amount = f"{share:g} of its {unit}"
                else:
                    amount = f"fewer {unit} than it"
                claim = f"K-FAC's rules reach the final loss of {title(self.rival)} in {amount}"
                if share == 1:
                    holds = own < theirs
                else:
                    holds = own <= share * theirs
                numbers = f"{_shown(own)} and {_shown(theirs)} {unit} to {level:.4f}"
                out.append((claim, holds, numbers))
        return out


def final(records: Sequence[Record]) -> float:
    """The median over seeds of the last held-out loss, ∞ where runs were lost."""
    return median(finite(r["held-out loss"][-1]) for r in records)


def reached(records: Sequence[Record], level: float, along: str) -> float:
    """Steps or seconds at which the median curve is at a loss, between evaluations along a line.

    >>> run = {"step": [0, 10, 20], "held-out loss": [3.0, 2.0, 1.0]}
    >>> reached([run], 1.5, "step"), reached([run], 0.5, "step")
    (15.0, inf)
    """
    count = min(len(r["step"]) for r in records)  # a lost run ends early
    curve = [median(finite(r["held-out loss"][i]) for r in records) for i in range(count)]
    places = [median(r[along][i] for r in records) for i in range(count)]
    for i, loss in enumerate(curve):
        if loss <= level:
            if i:
                before = curve[i - 1]
            else:
                before = math.inf
            if before < math.inf:
                part = (before - level) / (before - loss)
            else:
                part = 1.0
            if not i:
                return places[i]
            return places[i - 1] + part * (places[i] - places[i - 1])
    return math.inf


def _own(found: Found, ours: Sequence[str]) -> list[Sequence[Record]]:
    """Runs of K-FAC's rules, of full length and shorter."""
    return [runs for name, runs in found.items() if name in ours or name.startswith("ours")]


def table(found: Found, heading: str) -> Table:
    """Every optimizer with its rate, its end and its times."""
    rows = []
    for name, runs in found.items():
        rows.append(
            [
                title(name, runs[0]["method"]),
                f"{runs[0]['lr']:g}",
                str(runs[0]["steps"]),
                f"{final(runs):.4f}",
                f"{median(r['accuracy'][-1] for r in runs):.3f}",
                f"{median(r['seconds'][-1] for r in runs):.3g}",
                f"{median(r['ms'] for r in runs):.1f}",
            ]
        )
    columns = ["optimizer", "lr", "steps", "held-out loss", "accuracy", "seconds", "ms/step"]
    count = len(next(iter(found.values())))
    return Table(columns, rows, f"{heading}: medians over {count} seed{'s'[: count > 1]}")


def _shown(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.4g}"
    return "never"


#: as the pages call them
_NAMES = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "muon": "Muon",
    "muon-0.9": "Muon, momentum 0.9",
    "soap": "SOAP",
    "kfac-spectral": "K-FAC, spectral",
    "kfac-eigenbasis": "K-FAC, eigenbasis",
    "kfac-natural": "K-FAC, natural",
}


def title(name: str, method: str = "kfac-spectral") -> str:
    """An optimizer's name for readers, and that of a shorter run of `method`.

    >>> title("muon-0.9"), title("ours, 0.85")
    ('Muon, momentum 0.9', 'K-FAC, spectral, 0.85 of the steps')
    """
    if not _shorter(name):
        return _NAMES.get(name, name)
    return f"{_NAMES.get(method, method)}, {name.removeprefix('ours, ')} of the steps"


_ALONG = {"step": "steps", "seconds": "seconds of training"}
_FAR = 3  # times the least loss: ends above are not shown


def draw(races: Mapping[str, Found], heading: str) -> Figure:
    """Medians and quartiles over seeds; shorter runs of ours are dashed."""
    figure = plots.new(12, 0.4 + 4 * len(races), heading)
    panels = figure.subplots(len(races), 2, squeeze=False)
    for row, (name, found) in zip(panels, races.items(), strict=True):
        colors = plots.colors(n for n in found if not _shorter(n))
        for axes, along in zip(row, _ALONG, strict=True):
            for method, runs in found.items():
                xs = _places(runs, along)
                ys = [r["held-out loss"] for r in runs]
                color = colors[runs[0]["method"] if _shorter(method) else method]
                if _shorter(method):
                    style = {"ls": "--", "lw": 1.2}
                else:
                    style = {}
                plots.band(axes, xs, ys, color, title(method, runs[0]["method"]), **style)
            plots.dress(axes, logx=False, logy=False)
            axes.set_ylim(*_limits(found))
            axes.set_xlim(left=0)
            plots.label(axes, _ALONG[along], "held-out loss", name if along == "step" else "")
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        row[-1].legend(frameon=False, fontsize=9, **place)
    return figure


def series(found: Found, along: Iterable[str]) -> list[Series]:
    """The same lines for a page that draws them itself."""
    places = plots.places(n for n in found if not _shorter(n))
    lines = []
    for name, runs in found.items():
        if runs:
            if _shorter(name):
                method = runs[0]["method"]
            else:
                method = name
            style = "dashed" if _shorter(name) else "solid"
            words = title(name, method)
            color = places.get(method)
            lines.append(over_seeds(words, runs, "held-out loss", along, color=color, style=style))
    return [line for line in lines if line is not None]


def _places(runs: Sequence[Record], along: str) -> list[list[float]]:
    """Medians over seeds of when an evaluation took place, for each run as many as it has."""
    longest = max(len(r[along]) for r in runs)
    middle = [median(r[along][i] for r in runs if i < len(r[along])) for i in range(longest)]
    return [middle[: len(r[along])] for r in runs]


def _shorter(name: str) -> bool:
    return name.startswith("ours")


def _limits(found: Found) -> tuple[float, float]:
    """Where curves end, and what is above it; their start is far above what matters."""
    seen = [v for runs in found.values() for r in runs for v in r["held-out loss"]]
    low = min((v for v in seen if math.isfinite(v)), default=1.0)
    high = max((v for v in map(final, found.values()) if v < _FAR * low), default=low)
    return 0.95 * low, max(1.15 * high, 1.2 * low)
