"""The experiment: every network and its twin, trained by every method."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from ..framework import plots
from ..framework.check import Check, Claim, make_checks
from ..framework.curves import Chart, Line, Series
from ..framework.experiment import Context, Experiment, Item
from ..framework.plots import INK
from ..framework.store import Results
from ..framework.tabular import Table
from .methods import GROUPS, INVARIANT, METHODS, STEPS, TIKHONOV, UNDAMPED, TwinMethod, TwinRun, run
from .nets import EXHIBITS, NETS, Net

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PAPER = "Luk and Grosse (2018), A Coordinate-Free Construction of Scalable Natural Gradient"
_ABOUT = (
    "The paper has no experiments; these pairs are ours. Float64, the exact Fisher metric, "
    "statistics and inverses at every step. The record is of seeds 0–9."
)
_QUICK_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Invariance(Experiment):
    """Networks and twins side by side.

    Attributes:
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
    nets: Sequence[Net] = field(default=NETS)
    exhibits: Sequence[Net] = field(default=EXHIBITS)

    def smoke(self) -> Self:
        changes = {"nets": self.nets[:2], "exhibits": self.exhibits[:1], "quick_seeds": (0,)}
        return replace(self, judged=False, **changes)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "steps": _QUICK_STEPS if quick else STEPS,
            "nets": {n.name: n.about for n in (*self.nets, *self.exhibits)},
            "methods": {m.name: m.about for m in METHODS},
        }

    def items(self, quick: bool) -> list[Item]:
        steps = _QUICK_STEPS if quick else STEPS
        return [
            Item((net.name, method.name), partial(_work, net, method, steps))
            for net, method in self._pairs()
        ]

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


def _work(net: Net, method: TwinMethod, steps: int, context: Context) -> dict[str, Any]:
    return vars(run(net.make(context.seed), method, steps))


def main_table(records: GroupedRecords, nets: Sequence[Net]) -> Table:
    """The largest mismatch over steps, seeds and variants, and the worst condition."""
    rows = [
        [
            net.name,
            *(f"{max(r.worst for r in records[net.name, g]):.0e}" for g in GROUPS),
            f"{_condition(records, net):.0e}",
        ]
        for net in nets
    ]
    return Table(["network", *GROUPS, "condition"], rows, "Largest mismatch of network and twin")


def exhibit_table(records: GroupedRecords, nets: Sequence[Net]) -> Table:
    """Where theory says no, or yes by a hair."""
    rows = []
    for net in nets:
        before = max(r.mismatch[0] for r in records[net.name, UNDAMPED])
        worst = [max(r.worst for r in records[net.name, g]) for g in (UNDAMPED, INVARIANT)]
        rows.append([net.name, net.about, f"{before:.0e}", *(f"{w:.0e}" for w in worst)])
    columns = ["pair", "what is special", "before", UNDAMPED, INVARIANT]
    return Table(columns, rows, "At the edges of the theorems", text=2)


def _condition(records: GroupedRecords, net: Net) -> float:
    groups = (UNDAMPED, INVARIANT, TIKHONOV)
    return max(r.condition or 1.0 for g in groups for r in records[net.name, g])


# where exact equality and divergence are drawn
_BOTTOM = 1e-16
_TOP = 1e3


def charts(records: GroupedRecords, nets: Sequence[Net]) -> list[Chart]:
    """One for each network."""
    return [
        Chart(
            net.name,
            "mismatch of network and twin",
            [_series(group, records[net.name, group]) for group in GROUPS],
            logx=False,
            note="medians over seeds and variants, between the best and the worst",
        )
        for net in nets
    ]


def _series(group: str, records: Sequence[TwinRun]) -> Series | None:
    if not records:
        return None
    columns = list(
        zip(*([min(max(v, _BOTTOM), _TOP) for v in r.mismatch] for r in records), strict=True)
    )
    middle, low, high = ([f(c) for c in columns] for f in (median, min, max))
    line = Line(list(range(len(columns))), middle, low, high)
    return Series(group, {"step": line}, plots.places([group])[group], plots.dashes(group))


_COLUMNS = 3


def draw(records: GroupedRecords, nets: Sequence[Net]) -> Figure:
    """One panel per network."""
    rows = math.ceil(len(nets) / _COLUMNS)
    title = "A network and its affinely reparametrized twin, trained alike"
    figure = plots.new(11, 0.9 + 2.6 * rows, title)
    grid = figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True, sharey=True)
    for axes, net in zip(grid.flat, nets, strict=False):
        for group, color in plots.colors(GROUPS).items():
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
    """The median over seeds and variants, between the best and the worst."""
    curves = [[_shown(v) for v in r.mismatch] for r in records]
    steps = range(len(curves[0]))
    columns = list(zip(*curves, strict=True))
    middle = [median(c) for c in columns]
    axes.plot(steps, middle, color=color, lw=1.9, ls=plots.dashes(name), label=name)
    low = [min(c) for c in columns]
    high = [max(c) for c in columns]
    axes.fill_between(steps, low, high, color=color, alpha=0.15, lw=0)


def _shown(value: float) -> float:
    """Within the panel: exact equality and divergence have no place on a logarithmic axis."""
    return min(max(value, _BOTTOM), _TOP)


def _dress(axes: Axes, net: Net) -> None:
    plots.dress(axes, logx=False)
    axes.set_ylim(_BOTTOM, _TOP)
    axes.axhline(SAME, color=INK, lw=0.9, ls=":", label="taken for equal")
    plots.label(axes, title=net.name)


SAME = 1e-9
SOUND = 1e6
APART = 1e-3

#: records by network, method's group, and seed or variant
GroupedRecords = Mapping[tuple[str, str], Sequence[TwinRun]]

#: the verdicts over seeds 0–9, in the order of the claims
RECORDED = (True, True, True, True, False, False, False, True, False, True, True, True, False)

#: places of the claims that are not the paper's: damping, other methods, what lies outside
OURS = {1, 2, 3, 6, 8, 10, 12}

_KFAC = (UNDAMPED, INVARIANT)


def claims(records: GroupedRecords) -> list[Check]:
    """The theorems on pairs of networks, and what lies just outside of them."""
    verdicts = [
        _all_same("K-FAC without damping, KL clip", _of(records, UNDAMPED)),
        _all_same("K-FAC with invariant damping", _of(records, INVARIANT)),
        _dead(records),
        _others(records),
        _start(
            records, "zero padding with a shift", "Theorem 4.2 holds with zero padding and γ ≠ 0"
        ),
        _start(records, "RNN, a₀ kept", "Theorem 5.2 holds with a₀ as it was"),
        _same(records, "RNN, inputs shifted", "a recurrent net may shift its inputs"),
        _same(records, "Gauss–Newton, inside", "Gauss–Newton K-FAC is invariant inside the net"),
        _same(records, "Gauss–Newton, output", "Gauss–Newton K-FAC is invariant at the output"),
        _same(records, "metric carried over", "it is if the metric is carried over"),
        _softmax(records),
        _same(records, "softmax", "with softmax the probabilities agree"),
        _same(records, "softmax, logits", "with softmax the logits agree"),
    ]
    return make_checks(verdicts, RECORDED, OURS)


def sound(records: Iterable[TwinRun]) -> list[TwinRun]:
    """Those whose factors are conditioned well enough to ask for nine digits."""
    return [r for r in records if r.condition is not None and r.condition <= SOUND]


def _of(records: GroupedRecords, group: str) -> list[TwinRun]:
    return [r for net in NETS for r in records[net.name, group]]


def _all_same(what: str, records: Sequence[TwinRun]) -> Claim:
    sound_records = sound(records)
    worst = max(r.worst for r in sound_records)
    claim = f"{what}: the same function to {SAME:.0e} where conditions are at most {SOUND:.0e}"
    return (
        claim,
        worst <= SAME,
        f"{worst:.0e} at most in {len(sound_records)} of {len(records)} runs",
    )


def _dead(records_by_net: GroupedRecords) -> Claim:
    records = [*records_by_net["dead inputs", UNDAMPED], *records_by_net["dead inputs", INVARIANT]]
    warned = sum(any("input side is singular" in note for note in r.notes) for r in records)
    worst = max(r.worst for r in records)
    holds = warned == len(records) and worst <= SAME
    claim = "directions that never occur are left out, reported, and change nothing"
    return claim, holds, f"{warned} of {len(records)} runs report, mismatch {worst:.0e}"


def _others(records: GroupedRecords) -> Claim:
    others = [group for group in GROUPS if group not in _KFAC]
    least = {group: min(r.worst for r in _of(records, group)) for group in others}
    numbers = ", ".join(f"{group} at least {value:.0e}" for group, value in least.items())
    return "the other methods tell the two apart", min(least.values()) > APART, numbers


def _start(records: GroupedRecords, net: str, claim: str) -> Claim:
    worst = max(r.mismatch[0] for r in records[net, UNDAMPED])
    return claim, worst <= SAME, f"before any step {worst:.0e}"


def _same(records_by_net: GroupedRecords, net: str, claim: str) -> Claim:
    records = [r for (n, g), rs in records_by_net.items() if n == net and g in _KFAC for r in rs]
    worst = max(r.worst for r in records)
    return claim, worst <= SAME, f"mismatch {worst:.0e}"


def _softmax(records_by_net: GroupedRecords) -> Claim:
    records = records_by_net["softmax", UNDAMPED]
    warned = sum(any("softmax" in d for d in r.degenerate) for r in records)
    claim = "the metric of softmax logits is degenerate, and `degenerate()` says so"
    return claim, warned == len(records), f"{warned} of {len(records)} runs"
