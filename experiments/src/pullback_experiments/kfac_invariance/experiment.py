"""The experiment: every network and its twin, trained by every method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from ..framework import plots
from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart, Line, Series
from ..framework.experiment import Context, Experiment, Item
from ..framework.plots import INK
from ..framework.store import Results
from ..framework.tabular import Table
from .methods import GROUPS, INVARIANT, METHODS, TIKHONOV, UNDAMPED, TwinMethod, TwinRun, run
from .nets import EXHIBITS, NETS, Net

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PAPER = "Luk and Grosse (2018), A Coordinate-Free Construction of Scalable Natural Gradient"
_ABOUT = (
    "The paper has no experiments; these pairs are ours. Float64, the exact Fisher metric, "
    "statistics and inverses at every step. The record is of seeds 0–9."
)


@dataclass(frozen=True)
class MismatchLevels:
    """What mismatches of a network and its twin mean."""

    #: functions that differ by no more are taken for the same
    largest_equal: float = 1e-9
    #: functions that differ by more are taken for different ones
    least_different: float = 1e-3
    #: the largest condition of a factor at which nine digits are asked for in float64
    sound_condition: float = 1e6
    #: where exact equality and divergence are drawn on a logarithmic axis
    bottom: float = 1e-16
    top: float = 1e3

    def clip(self, mismatch: float) -> float:
        """Return the mismatch, moved into the panel."""
        return min(max(mismatch, self.bottom), self.top)


LEVELS = MismatchLevels()


@dataclass(frozen=True, kw_only=True)
class Invariance(Experiment):
    """Networks and twins side by side.

    Attributes:
        steps, quick_steps: of both networks.
        nets: on which all methods are compared.
        exhibits: on which only K-FAC runs, undamped and invariantly damped, in two variants each.
    """

    name: str = "luk-grosse-2018"
    paper: str = PAPER
    figure: str = "Theorems 2.1, 4.2, 5.2"
    claim: str = "K-FAC trains a network and its affinely reparametrized twin alike"
    about: str = _ABOUT
    quick_seeds: Sequence[int] = (0, 1)
    anywhere: bool = False
    open_parts: frozenset[str] = frozenset({"nets", "methods"})
    steps: int = 10
    quick_steps: int = 3
    nets: Sequence[Net] = field(default=NETS)
    exhibits: Sequence[Net] = field(default=EXHIBITS)

    def smoke(self) -> Self:
        changes = {"nets": self.nets[:2], "exhibits": self.exhibits[:1], "quick_seeds": (0,)}
        return replace(self, judged=False, **changes)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "steps": self._steps(quick),
            "nets": {n.name: n.about for n in (*self.nets, *self.exhibits)},
            "methods": {m.name: m.about for m in METHODS},
        }

    def items(self, quick: bool) -> list[Item]:
        steps = self._steps(quick)
        return [
            Item((net.name, method.name), partial(_run_pair, net, method, steps))
            for net, method in self._pairs()
        ]

    def _steps(self, quick: bool) -> int:
        if quick:
            return self.quick_steps
        return self.steps

    def _pairs(self) -> Iterator[tuple[Net, TwinMethod]]:
        for net in self.nets:
            yield from ((net, method) for method in METHODS)
        for net in self.exhibits:
            yield from ((net, method) for method in METHODS if method.plain)

    def judge(self, results: Results) -> list[Check]:
        return claims(self._group_records(results))

    def draw(self, results: Results) -> dict[str, Figure]:
        return {"": draw(self._group_records(results), self.nets)}

    def curves(self, results: Results) -> list[Chart]:
        return charts(self._group_records(results), self.nets)

    def tables(self, results: Results) -> list[Table]:
        records = self._group_records(results)
        return [main_table(records, self.nets), exhibit_table(records, self.exhibits)]

    def _group_records(self, results: Results) -> GroupedRecords:
        groups: dict[tuple[str, str], list[TwinRun]] = {}
        for net, method in self._pairs():
            runs = [TwinRun(**one) for one in results.of(net.name, method.name)]
            groups.setdefault((net.name, method.group), []).extend(runs)
        return groups


def _run_pair(net: Net, method: TwinMethod, steps: int, context: Context) -> dict[str, Any]:
    return vars(run(net.make(context.seed), method, steps))


def main_table(records: GroupedRecords, nets: Sequence[Net]) -> Table:
    """Return the largest mismatch over steps, seeds and variants, and the worst condition."""
    rows = []
    for net in nets:
        mismatches = [_worst(records[net.name, group]) for group in GROUPS]
        rows.append([net.name, *map(_format_power, (*mismatches, _condition(records, net)))])
    return Table(["network", *GROUPS, "condition"], rows, "Largest mismatch of network and twin")


def exhibit_table(records: GroupedRecords, nets: Sequence[Net]) -> Table:
    """Return the cases that theory excludes, and those that it barely includes."""
    rows = []
    for net in nets:
        before = max(r.mismatch[0] for r in records[net.name, UNDAMPED])
        worst = [_worst(records[net.name, group]) for group in (UNDAMPED, INVARIANT)]
        rows.append([net.name, net.about, *map(_format_power, (before, *worst))])
    columns = ["pair", "what is special", "before", UNDAMPED, INVARIANT]
    return Table(columns, rows, "At the edges of the theorems", text=2)


def _worst(records: Sequence[TwinRun]) -> float:
    """Return the largest mismatch of the runs."""
    return max(r.worst for r in records)


def _format_power(value: float) -> str:
    return f"{value:.0e}"


def _condition(records: GroupedRecords, net: Net) -> float:
    """Return the worst condition of a factor in the runs of K-FAC."""
    runs = chain.from_iterable(records[net.name, g] for g in (UNDAMPED, INVARIANT, TIKHONOV))
    return max(r.condition or 1.0 for r in runs)


def charts(records: GroupedRecords, nets: Sequence[Net]) -> list[Chart]:
    """Return one chart per network."""
    return [_chart(net, records) for net in nets]


def _chart(net: Net, records: GroupedRecords) -> Chart:
    return Chart(
        net.name,
        "mismatch of network and twin",
        [_series(group, records[net.name, group]) for group in GROUPS],
        logx=False,
        note="medians over seeds and variants, between the best and the worst",
    )


def _series(group: str, records: Sequence[TwinRun]) -> Series | None:
    if not records:
        return None
    line = _summarize_curves(records)
    return Series(
        group, {"step": line}, plots.assign_places([group])[group], plots.choose_dashes(group)
    )


def _summarize_curves(records: Sequence[TwinRun]) -> Line:
    """Return the median over seeds and variants by step, between the best and the worst."""
    curves = [list(map(LEVELS.clip, r.mismatch)) for r in records]
    by_step = list(zip(*curves, strict=True))
    steps = list(range(len(by_step)))
    return Line(steps, list(map(median, by_step)), list(map(min, by_step)), list(map(max, by_step)))


def draw(records: GroupedRecords, nets: Sequence[Net]) -> Figure:
    """Draw one panel per network."""
    columns = 3
    rows = math.ceil(len(nets) / columns)
    title = "A network and its affinely reparametrized twin, trained alike"
    figure = plots.make_figure(11, 0.9 + 2.6 * rows, title)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes, net in zip(grid.flat, nets, strict=False):
        for group, color in plots.assign_colors(GROUPS).items():
            _band(axes, records[net.name, group], color, group)
        _dress(axes, net)
    for axes in list(grid.flat)[len(nets) :]:
        axes.set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("step", color=INK)
    for row in grid:
        row[0].set_ylabel("mismatch", color=INK)
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def _band(axes: Axes, records: Sequence[TwinRun], color: str, name: str) -> None:
    """Draw the median over seeds and variants, between the best and the worst."""
    line = _summarize_curves(records)
    axes.plot(line.x, line.y, color=color, lw=1.9, ls=plots.choose_dashes(name), label=name)
    axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.15, lw=0)


def _dress(axes: Axes, net: Net) -> None:
    plots.format_axes(axes, logx=False)
    axes.set_ylim(LEVELS.bottom, LEVELS.top)
    axes.axhline(LEVELS.largest_equal, color=INK, lw=0.9, ls=":", label="taken for equal")
    plots.label(axes, title=net.name)


#: records by network, method's group, and seed or variant
GroupedRecords = Mapping[tuple[str, str], Sequence[TwinRun]]

#: the verdicts over seeds 0–9, in the order of the claims
RECORDED = (True, True, True, True, False, False, False, True, False, True, True, True, False)

#: places of the claims that are not the paper's: damping, other methods, what lies outside
OURS = {1, 2, 3, 6, 8, 10, 12}

_KFAC = (UNDAMPED, INVARIANT)


def claims(records: GroupedRecords) -> list[Check]:
    """Return the checks of the theorems on pairs of networks, and of cases just outside of them."""
    verdicts = [
        _claim_all_same("K-FAC without damping, KL clip", _runs_of_group(records, UNDAMPED)),
        _claim_all_same("K-FAC with invariant damping", _runs_of_group(records, INVARIANT)),
        _claim_dead_inputs(records),
        _claim_others_differ(records),
        _claim_same_start(
            records, "zero padding with a shift", "Theorem 4.2 holds with zero padding and γ ≠ 0"
        ),
        _claim_same_start(records, "RNN, a₀ kept", "Theorem 5.2 holds with a₀ as it was"),
        _claim_same(records, "RNN, inputs shifted", "a recurrent net may shift its inputs"),
        _claim_same(
            records, "Gauss–Newton, inside", "Gauss–Newton K-FAC is invariant inside the net"
        ),
        _claim_same(
            records, "Gauss–Newton, output", "Gauss–Newton K-FAC is invariant at the output"
        ),
        _claim_same(records, "metric carried over", "it is if the metric is carried over"),
        _claim_degenerate(records),
        _claim_same(records, "softmax", "with softmax the probabilities agree"),
        _claim_same(records, "softmax, logits", "with softmax the logits agree"),
    ]
    return make_checks(verdicts, RECORDED, OURS)


def select_sound(records: Iterable[TwinRun]) -> list[TwinRun]:
    """Return the pairs whose factors are conditioned well enough for nine digits."""
    limit = LEVELS.sound_condition
    return [r for r in records if r.condition is not None and r.condition <= limit]


def _runs_of_group(records: GroupedRecords, group: str) -> list[TwinRun]:
    return list(chain.from_iterable(records[net.name, group] for net in NETS))


def _claim_all_same(what: str, records: Sequence[TwinRun]) -> Claim:
    sound_records = select_sound(records)
    worst = _worst(sound_records)
    claim = f"{what}: the same function to {LEVELS.largest_equal:.0e}"
    claim += f" where conditions are at most {LEVELS.sound_condition:.0e}"
    return (
        claim,
        worst <= LEVELS.largest_equal,
        f"{worst:.0e} at most in {len(sound_records)} of {len(records)} runs",
    )


def _claim_dead_inputs(records_by_net: GroupedRecords) -> Claim:
    records = [*records_by_net["dead inputs", UNDAMPED], *records_by_net["dead inputs", INVARIANT]]
    warned = sum("input side is singular" in "\n".join(r.notes) for r in records)
    worst = _worst(records)
    holds = warned == len(records) and worst <= LEVELS.largest_equal
    claim = "directions that never occur are left out, reported, and change nothing"
    return claim, holds, f"{warned} of {len(records)} runs report, mismatch {worst:.0e}"


def _claim_others_differ(records: GroupedRecords) -> Claim:
    others = [group for group in GROUPS if group not in _KFAC]
    least = {}
    for group in others:
        least[group] = min(r.worst for r in _runs_of_group(records, group))
    numbers = ", ".join(f"{group} at least {value:.0e}" for group, value in least.items())
    return (
        "the other methods tell the two apart",
        min(least.values()) > LEVELS.least_different,
        numbers,
    )


def _claim_same_start(records: GroupedRecords, net: str, claim: str) -> Claim:
    worst = max(r.mismatch[0] for r in records[net, UNDAMPED])
    return claim, worst <= LEVELS.largest_equal, f"before any step {worst:.0e}"


def _claim_same(records_by_net: GroupedRecords, net: str, claim: str) -> Claim:
    groups = [group for group in _KFAC if (net, group) in records_by_net]
    worst = max(_worst(records_by_net[net, group]) for group in groups)
    return claim, worst <= LEVELS.largest_equal, f"mismatch {worst:.0e}"


def _claim_degenerate(records_by_net: GroupedRecords) -> Claim:
    records = records_by_net["softmax", UNDAMPED]
    warned = sum("softmax" in "\n".join(r.degenerate) for r in records)
    claim = "the metric of softmax logits is degenerate, and `degenerate()` says so"
    return claim, warned == len(records), f"{warned} of {len(records)} runs"
