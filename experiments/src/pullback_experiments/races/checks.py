"""What a race says: ends, and how soon K-FAC's rules are where another optimizer ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from statistics import median
from typing import TYPE_CHECKING

from ..framework import plots
from ..framework.check import Claim
from ..framework.curves import Series, finite, over_seeds
from ..framework.records import Record
from ..framework.tabular import Table, count_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: records over seeds, by optimizer; runs with fewer steps are called "kfac, 0.85"
GroupedRecords = Mapping[str, Sequence[Record]]


@dataclass(frozen=True)
class Lead:
    """A claim: ours end below a rival by so much, or reach its end in such shares.

    Attributes:
        rival: whose final held-out loss it is about.
        below: nats.
        steps, seconds: shares of the rival's.
        by: which of ours, by default the best of them.
    """

    rival: str
    below: float | None = None
    steps: float | None = None
    seconds: float | None = None
    by: str | None = None

    def judge_claims(self, records: GroupedRecords, ours: Sequence[str]) -> list[Claim]:
        """Return (claim, holds, numbers) of all that it claims."""
        if self.by is not None:
            ours = [self.by]
        claims = []
        if self.below is not None:
            claims.append(self._judge_end(records, ours, self.below))
        if self.steps is not None:
            claims.append(self._judge_speed(records, ours, "step", self.steps))
        if self.seconds is not None:
            claims.append(self._judge_speed(records, ours, "seconds", self.seconds))
        return claims

    def _subject(self) -> str:
        if self.by is None:
            return "K-FAC's rules"
        return f"Runs of {title(self.by)}"

    def _judge_end(self, records: GroupedRecords, ours: Sequence[str], below: float) -> Claim:
        """Judge whether the best of ours ends so much below the rival."""
        level = final(records[self.rival])
        ends = {name: final(records[name]) for name in ours if name in records}
        end = math.inf
        best_title = "none"
        if ends:
            best = min(ends, key=lambda name: ends[name])
            end = ends[best]
            best_title = title(best)
        claim = f"{self._subject()} end {below:g} below {title(self.rival)}"
        return claim, end <= level - below, f"{end:.4f} ({best_title}) and {level:.4f}"

    def _judge_speed(
        self, records: GroupedRecords, ours: Sequence[str], along: str, share: float
    ) -> Claim:
        """Judge whether ours reach the rival's end in a share of its steps or seconds."""
        level = final(records[self.rival])
        theirs = median(record[along][-1] for record in records[self.rival])
        times = [find_crossing(runs, level, along) for runs in _runs_of_ours(records, ours)]
        best = min(times, default=math.inf)
        unit = along.rstrip("s") + "s"
        if share == 1:
            amount = f"fewer {unit} than it"
            holds = best < theirs
        else:
            amount = f"{share:g} of its {unit}"
            holds = best <= share * theirs
        claim = f"{self._subject()} reach the final loss of {title(self.rival)} in {amount}"
        return claim, holds, f"{_shown(best)} and {_shown(theirs)} {unit} to {level:.4f}"


def final(records: Sequence[Record]) -> float:
    """Return the median over seeds of the last held-out loss, ∞ where runs diverged."""
    return median(finite(r["held-out loss"][-1]) for r in records)


def find_crossing(records: Sequence[Record], level: float, along: str) -> float:
    """Return the steps or seconds at which the median curve reaches a loss, ∞ if it never does.

    Between two evaluations it is interpolated linearly.

    >>> run = {"step": [0, 10, 20], "held-out loss": [3.0, 2.0, 1.0]}
    >>> find_crossing([run], 1.5, "step"), find_crossing([run], 0.5, "step")
    (15.0, inf)
    """
    count = min(len(record["step"]) for record in records)  # a run that diverged ends early
    losses = [_median_at(records, "held-out loss", i) for i in range(count)]
    times = list(map(median, zip(*(record[along][:count] for record in records), strict=True)))
    first = next((i for i, loss in enumerate(losses) if loss <= level), None)
    if first is None:
        return math.inf
    if first == 0 or losses[first - 1] == math.inf:
        return times[first]
    before = losses[first - 1]
    fraction = (before - level) / (before - losses[first])
    return times[first - 1] + fraction * (times[first] - times[first - 1])


def _median_at(records: Sequence[Record], name: str, i: int) -> float:
    return median(finite(record[name][i]) for record in records)


def _runs_of_ours(records: GroupedRecords, ours: Sequence[str]) -> list[Sequence[Record]]:
    """Return runs of K-FAC's rules, of full length and shorter."""
    return [runs for name, runs in records.items() if _entrant(name) in ours]


def table(records: GroupedRecords, heading: str) -> Table:
    """Return a table of every optimizer with its rate, its final loss and its times."""
    rows = []
    for name, runs in records.items():
        rows.append(
            [
                title(name),
                f"{runs[0]['lr']:g}",
                str(runs[0]["steps"]),
                f"{final(runs):.4f}",
                f"{median(r['accuracy'][-1] for r in runs):.3f}",
                f"{median(r['seconds'][-1] for r in runs):.3g}",
                f"{median(r['ms'] for r in runs):.1f}",
                str(len(runs)),
            ]
        )
    columns = ["optimizer", "lr", "steps", "held-out loss", "accuracy", "seconds", "ms/step"]
    count = max(map(len, records.values()))
    title_of_table = f"{heading}: medians over {count_of(count, 'seed')}"
    return Table([*columns, "seeds"], rows, title_of_table)


def _shown(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.4g}"
    return "never"


#: as the pages call them
_NAMES = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "muon": "Muon, momentum 0.95",
    "muon-0.9": "Muon, momentum 0.9",
    "muon-0.9-half": "Muon, AdamW at half its rate",
    "muon-half": "Muon, momentum 0.95, AdamW at half its rate",
    "normuon": "NorMuon, momentum 0.95",
    "normuon-0.9": "NorMuon, momentum 0.9",
    "normuon-0.9-half": "NorMuon, AdamW at half its rate",
    "normuon-0.9-muon-length": "NorMuon, as long as Muon's steps",
    "normuon-muon-length": "NorMuon, momentum 0.95, as long as Muon's steps",
    "soap": "SOAP",
    "kfac-spectral": "K-FAC, spectral",
    "kfac-eigenbasis": "K-FAC, eigenbasis",
    "kfac-natural": "K-FAC, natural",
    "kfac": "K-FAC",
    "kfac-two-sided": "K-FAC, two-sided",
    "kfac-two-sided-warm-up": "K-FAC, two-sided, warm-up",
    "kfac-two-sided-often": "K-FAC, two-sided, refreshed often",
    "kfac-two-sided-often-gentle-start": "K-FAC, two-sided, gentle start, refreshed often",
    "kfac-gentle-start": "K-FAC, gentle start",
    "kfac-two-sided-gentle-start": "K-FAC, two-sided, gentle start",
    "kfac-plain-start": "K-FAC, no gentle start",
    "kfac-two-sided-plain-start": "K-FAC, two-sided, no gentle start",
    "kfac-adapt-0.99": "K-FAC, squares remembered by 0.99",
    "kfac-rate-0.5": "K-FAC, half the rate",
    "kfac-rate-2": "K-FAC, twice the rate",
}


def name_shorter_run(entrant: str, share: float) -> str:
    """Return the name of an entrant's runs with a share of the steps.

    >>> name_shorter_run("kfac", 0.8)
    'kfac, 0.8'
    """
    return f"{entrant}, {share:g}"


def title(name: str) -> str:
    """Return the name for readers of an optimizer, or of its runs with fewer steps.

    >>> title("muon-0.9"), title("kfac, 0.8")
    ('Muon, momentum 0.9', 'K-FAC, 0.8 of the steps')
    """
    entrant, _, share = name.partition(", ")
    words = _NAMES.get(entrant, entrant)
    if share:
        return f"{words}, {share} of the steps"
    return words


_ALONG = {"step": "steps", "seconds": "seconds of training"}


def draw(races: Mapping[str, GroupedRecords], heading: str) -> Figure:
    """Draw medians and quartiles over seeds; runs with fewer steps are dashed."""
    figure = plots.make_figure(12, 0.4 + 4 * len(races), heading)
    panels = figure.subplots(len(races), 2, squeeze=False)
    for row, (name, records) in zip(panels, races.items(), strict=True):
        colors = plots.assign_colors(n for n in records if not _is_shorter(n))
        for axes, along in zip(row, _ALONG, strict=True):
            for method, runs in records.items():
                xs = _places(runs, along)
                ys = [r["held-out loss"] for r in runs]
                style = {}
                if _is_shorter(method):
                    style = {"ls": "--", "lw": 1.2}
                plots.plot_band(axes, xs, ys, colors[_entrant(method)], title(method), **style)
            plots.format_axes(axes, logx=False, logy=False)
            axes.set_ylim(*_limits(records))
            axes.set_xlim(left=0)
            plots.label(axes, _ALONG[along], "held-out loss")
        plots.label(row[0], title=name)
        legend = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        row[-1].legend(frameon=False, fontsize=9, **legend)
    return figure


def series(records: GroupedRecords, along: Iterable[str]) -> list[Series]:
    """Return the lines of the figure for the report."""
    colors = plots.assign_places(n for n in records if not _is_shorter(n))
    lines = []
    for name, runs in records.items():
        if not runs:
            continue
        style = "solid"
        if _is_shorter(name):
            style = "dashed"
        color = colors.get(_entrant(name))
        words = title(name)
        lines.append(over_seeds(words, runs, "held-out loss", along, color=color, style=style))
    return [line for line in lines if line is not None]


def _places(runs: Sequence[Record], along: str) -> list[list[float]]:
    """Return medians over seeds of when each evaluation took place."""
    middle = []
    for times in zip_longest(*(r[along] for r in runs)):  # None after the end of a run
        middle.append(median(t for t in times if t is not None))
    return [middle[: len(r[along])] for r in runs]


def _is_shorter(name: str) -> bool:
    """Return True if these runs have fewer steps than the race."""
    return ", " in name


def _entrant(name: str) -> str:
    """Return whose runs these are, of full length or shorter."""
    return name.partition(", ")[0]


def _limits(records: GroupedRecords) -> tuple[float, float]:
    """Return the range of the axis: the ends of the curves, without their much larger starts."""
    runs = chain.from_iterable(records.values())
    losses = chain.from_iterable(run["held-out loss"] for run in runs)
    low = min(filter(math.isfinite, losses), default=1.0)
    ends = [end for end in map(final, records.values()) if end < 3 * low]  # others are lost
    high = max(ends, default=low)
    return 0.95 * low, max(1.15 * high, 1.2 * low)
