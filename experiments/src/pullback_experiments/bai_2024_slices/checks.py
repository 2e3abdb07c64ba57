"""What the paper says of Figure 2, and what theory says of it, as yes or no."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

from ..bai_2024_sobolev.curves import epochs, find_epoch, format_epochs
from ..framework.check import Check, Claim, make_checks
from ..framework.curves import quantiles
from ..framework.records import Record
from ..framework.tabular import Table
from .methods import ADAM, FIRST, POLAR, SECOND, SGD, SLICED, START, UNITS


@dataclass(frozen=True)
class Figure2Limits:
    """What the words of the claims mean."""

    #: accuracies that differ by at most a point are similar
    similar: float = 0.01
    #: an epoch that takes at most so many times as long as SGD's is as cheap
    cheap: float = 1.05
    #: epochs whose median is the end of a run: single ones have spikes
    last_epochs: int = 5


LIMITS = Figure2Limits()

#: the records of every method, one per seed
GroupedRecords = Mapping[str, Sequence[Record]]


#: which of them speak of seconds
TIMED = (1, 2)


def claims(
    records: GroupedRecords, law: Record, level: float, expected_outcomes: Sequence[bool]
) -> list[Check]:
    """Return checks of the paper's three claims, the start and other methods."""
    return make_checks(
        [
            _fewer(records, FIRST, SGD, level),
            _claim_sooner(records, FIRST, SGD, level),
            _claim_cheap(records, FIRST),
            _claim_similar(records, SECOND, FIRST),
            _by_start(records, level),
            _law(law),
            _fewer(records, SECOND, FIRST, level),
            _claim_above(records, UNITS, FIRST),
            _claim_above(records, POLAR, FIRST),
            _claim_above(records, SLICED, ADAM),
        ],
        expected_outcomes,
        ours=range(4, 10),
    )


def seconds_per_epoch(records: Sequence[Record]) -> float:
    """Return the seconds of an epoch: the median without the first, the least over seeds."""
    return min(map(_median_epoch, records))


def _median_epoch(record: Record) -> float:
    """Return the median seconds of an epoch, without the first where there are others."""
    spent = [b - a for a, b in pairwise(record["seconds"])]
    return median(spent[1:] or spent or [0.0])


def seconds(records: Sequence[Record], level: float) -> float:
    """Return the median over seeds of the seconds until a test accuracy is reached."""
    timed = [{**r, "epoch": r["seconds"]} for r in records]
    return quantiles([find_epoch(r, "test accuracy", level) for r in timed])[1]


def final(records: Sequence[Record]) -> tuple[float, float]:
    """Return mean and deviation over seeds of the last epochs' median; chance for a lost run."""
    ends = list(map(_end, records))
    deviation = 0.0
    if len(ends) > 1:
        deviation = stdev(ends)
    return fmean(ends), deviation


def _end(record: Record) -> float:
    """Return the test accuracy at the end; that of chance if the run was lost."""
    if not _finite(record):
        return 0.1
    return median(record["test accuracy"][-LIMITS.last_epochs :])


def _finite(record: Record) -> bool:
    return math.isfinite(record["train loss"][-1])


def _claim_sooner(records: GroupedRecords, one: str, two: str, level: float) -> Claim:
    a = seconds(records[one], level)
    b = seconds(records[two], level)
    claim = f"{one} needs less time than {two} to a test accuracy of {level:g}"
    return claim, a < b, f"{_format_seconds(a)} and {_format_seconds(b)}"


def _claim_cheap(records: GroupedRecords, name: str) -> Claim:
    ratio = seconds_per_epoch(records[name]) / seconds_per_epoch(records[SGD])
    claim = f"an epoch of {name} takes at most {LIMITS.cheap:g} times as long as one of SGD"
    return claim, ratio <= LIMITS.cheap, f"{ratio:.2f} times"


def _claim_similar(records: GroupedRecords, one: str, two: str) -> Claim:
    a = final(records[one])[0]
    b = final(records[two])[0]
    claim = f"{one} ends like {two}, within a point of test accuracy"
    return claim, abs(a - b) <= LIMITS.similar, f"{a:.4f} and {b:.4f}"


def _claim_above(records: GroupedRecords, one: str, two: str) -> Claim:
    count = min(len(records[one]), len(records[two]))  # the same seeds
    a = final(records[one][:count])[0]
    b = final(records[two][:count])[0]
    claim = f"{one} ends at least a point of test accuracy above {two}"
    return claim, a >= b + LIMITS.similar, f"{a:.4f} and {b:.4f}"


def _by_start(records: GroupedRecords, level: float) -> Claim:
    """Return True if the control is nearer to approach I than to SGD, or ahead of both."""
    plain, start, first = (epochs(records[m], "test accuracy", level) for m in (SGD, START, FIRST))
    claim = "the start explains it: SGD that begins on the slice and never returns to it gains at "
    claim += "least half of what approach I gains"
    holds = first < plain and start <= 0.5 * (first + plain) and math.isfinite(start)
    return (
        claim,
        holds,
        f"{format_epochs(plain)}, {format_epochs(start)} and {format_epochs(first)} epochs",
    )


def _law(law: Record) -> Claim:
    holds = law["one step"] <= 1e-10 and 1.8 <= law["slope"] <= 2.2
    ends = ", ".join(f"{v:.0e}" for v in law["two steps"])
    claim = "from the slice a step of approach I changes the function as SGD's does, and two steps "
    claim += "up to lr², relative"
    numbers = f"{law['one step']:.0e}; then {ends} with slope {law['slope']:.2f}"
    return claim, holds, numbers


def _fewer(records: GroupedRecords, one: str, two: str, level: float) -> Claim:
    a, b = (epochs(records[m], "test accuracy", level) for m in (one, two))
    claim = f"{one} needs at most nine tenths of the epochs of {two} to an accuracy of {level:g}"
    return (
        claim,
        math.isfinite(a) and a <= 0.9 * b,
        f"{format_epochs(a)} and {format_epochs(b)} epochs",
    )


def _format_seconds(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.3g} s"
    return "never"


def table(records: GroupedRecords, level: float) -> Table:
    """Return the table of final accuracies, levels and costs of every method."""
    base = seconds_per_epoch(records[SGD])
    rows = []
    for name, runs in records.items():
        mean, deviation = final(runs)
        best = fmean(max(r["test accuracy"]) for r in runs)
        rows.append(
            [
                name,
                f"{runs[0]['rate']:g}",
                f"{mean:.4f} ± {deviation:.4f}",
                f"{best:.4f}",
                format_epochs(epochs(runs, "test accuracy", level)),
                _format_seconds(seconds(runs, level)),
                f"{seconds_per_epoch(runs) / base:.2f}",
                f"{sum(not _finite(r) for r in runs)}/{len(runs)}",
            ]
        )
    columns = ["method", "lr", "test accuracy", "best", f"epochs to {level:g}", "time to it"]
    columns += ["epoch / SGD's", "lost of seeds"]
    return Table(columns, rows, "Over the seeds of each method")
