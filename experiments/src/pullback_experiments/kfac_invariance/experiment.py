"""The experiment: every network and its twin, trained by every method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ..framework.check import Check
from ..framework.curves import Chart
from ..framework.experiment import Context, Experiment, Item
from ..framework.results import Results
from ..framework.tabular import Table
from .charts import charts
from .checks import Found, claims
from .methods import GROUPS, INVARIANT, METHODS, TIKHONOV, UNDAMPED, Method
from .nets import EXHIBITS, NETS, Net
from .run import STEPS, Record, run

if TYPE_CHECKING:
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
        some = {"nets": self.nets[:2], "exhibits": self.exhibits[:1], "quick_seeds": (0,)}
        return replace(self, judged=False, **some)

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

    def _pairs(self) -> Iterator[tuple[Net, Method]]:
        for net in self.nets:
            yield from ((net, method) for method in METHODS)
        for net in self.exhibits:
            yield from ((net, method) for method in METHODS if method.plain)

    def judge(self, results: Results) -> list[Check]:
        return claims(self._found(results))

    def draw(self, results: Results) -> dict[str, Figure]:
        from .figure import draw  # matplotlib is slow to import

        return {"": draw(self._found(results), self.nets)}

    def curves(self, results: Results) -> list[Chart]:
        return charts(self._found(results), self.nets)

    def tables(self, results: Results) -> list[Table]:
        found = self._found(results)
        return [main_table(found, self.nets), exhibit_table(found, self.exhibits)]

    def _found(self, results: Results) -> Found:
        found: dict[tuple[str, str], list[Record]] = {}
        for net, method in self._pairs():
            runs = [Record(**one) for one in results.of(net.name, method.name)]
            found.setdefault((net.name, method.group), []).extend(runs)
        return found


def _work(net: Net, method: Method, steps: int, context: Context) -> dict[str, Any]:
    return vars(run(net.make(context.seed), method, steps))


def main_table(found: Found, nets: Sequence[Net]) -> Table:
    """The largest mismatch over steps, seeds and variants, and the worst condition."""
    rows = [
        [
            net.name,
            *(f"{max(r.worst for r in found[net.name, g]):.0e}" for g in GROUPS),
            f"{_condition(found, net):.0e}",
        ]
        for net in nets
    ]
    return Table(["network", *GROUPS, "condition"], rows, "Largest mismatch of network and twin")


def exhibit_table(found: Found, nets: Sequence[Net]) -> Table:
    """Where theory says no, or yes by a hair."""
    rows = []
    for net in nets:
        before = max(r.mismatch[0] for r in found[net.name, UNDAMPED])
        worst = [max(r.worst for r in found[net.name, g]) for g in (UNDAMPED, INVARIANT)]
        rows.append([net.name, net.about, f"{before:.0e}", *(f"{w:.0e}" for w in worst)])
    columns = ["pair", "what is special", "before", UNDAMPED, INVARIANT]
    return Table(columns, rows, "At the edges of the theorems", text=2)


def _condition(found: Found, net: Net) -> float:
    groups = (UNDAMPED, INVARIANT, TIKHONOV)
    return max(r.condition or 1.0 for g in groups for r in found[net.name, g])
