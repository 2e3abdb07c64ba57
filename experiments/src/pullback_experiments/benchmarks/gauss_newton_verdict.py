"""What a record of `gauss-newton-inner` means: ordinary steps, and passes, to the same loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Any

from ..framework.check import Check

#: what a run of `OuterRun` gave
Run = Mapping[str, Any]
#: steps or passes ↦ final held-out loss of the best run of this length
Curve = Mapping[float, float]

#: times fewer outer steps by 122 inner steps of Muon (Abreu et al., 2025, arXiv:2510.09378)
PUBLISHED_RATIO = 5.4
#: claims that did not hold in the full run; of the last one it is not known, since no run of
#: ordinary steps on batches of 64 was long enough
NOT_HOLDING = frozenset(
    (
        "batches of 16: 20 inner steps of K-FAC take 5.4 times fewer outer steps",
        "batches of 16: 20 inner steps of Muon take 5.4 times fewer outer steps",
        "batches of 16: 20 inner steps of K-FAC take fewer passes than steps on minibatches",
        "batches of 16: 20 inner steps of Muon take fewer passes than steps on minibatches",
        "batches of 64: 20 inner steps of K-FAC take fewer passes than steps on minibatches",
        "batches of 64: 20 inner steps of K-FAC take 5.4 times fewer outer steps",
    )
)
NAMES = {"kfac": "K-FAC", "muon-0.9": "Muon"}


@dataclass(frozen=True)
class Length:
    """How long a run of another kind is that ends at the same loss.

    It lies in [low, high]: one number between two lengths on record, and otherwise open at the
    side where there is none.

    >>> print(Length(40.0, 40.0), Length(0.0, 20.0), Length(160.0, inf))
    40 ≤20 >160
    """

    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:.0f}"
        if self.low == 0:
            return f"≤{self.high:.0f}"
        return f">{self.low:.0f}"

    def times(self, factor: float) -> Length:
        """Return the length in other units."""
        return Length(factor * self.low, factor * self.high)


def find_length(curve: Curve, loss: float) -> Length:
    """Return the length at which a curve is at this loss, linear in the length's logarithm.

    >>> find_length({20: 3.0, 80: 2.0}, 2.5)
    Length(low=40.0, high=40.0)
    """
    lengths = sorted(curve)
    if curve[lengths[0]] <= loss:
        return Length(0.0, lengths[0])
    for i in range(1, len(lengths)):
        before = curve[lengths[i - 1]]
        after = curve[lengths[i]]
        if after <= loss:
            share = (before - loss) / (before - after)
            ratio = log(lengths[i] / lengths[i - 1])
            length = round(lengths[i - 1] * exp(share * ratio), 6)
            return Length(length, length)
    return Length(lengths[-1], inf)


@dataclass(frozen=True)
class Comparison:
    """The best inner solver of a kind beside ordinary steps, for one seed.

    Attributes:
        run: the best of all rates.
        ordinary: ordinary steps on batches of the same size that end at its loss.
        small: steps on single minibatches that do, or None where none are on record.
    """

    run: Run
    ordinary: Length
    small: Length | None

    @property
    def ordinary_passes(self) -> Length:
        """Return the passes of the ordinary steps."""
        return self.ordinary.times(self.run["minibatches"])


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Return the best run of every kind of inner solver, batch and seed with its comparisons."""
    best: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        key = (run["minibatches"], run["method"], run["inner"], run["outer"], run["seed"])
        if run["inner"] and (key not in best or run["final"] < best[key]["final"]):
            best[key] = run
    comparisons = []
    for key in sorted(best):
        run = best[key]
        ordinary = _collect_curve(runs, run["minibatches"], run["seed"])
        if not ordinary:
            continue
        single = _collect_curve(runs, 1, None)
        small = None
        if single:
            small = find_length(single, run["final"])
        comparisons.append(Comparison(run, find_length(ordinary, run["final"]), small))
    return comparisons


def _collect_curve(runs: Sequence[Run], minibatches: int, seed: int | None) -> Curve:
    """Return the lowest loss of ordinary steps by their number, over all methods and rates."""
    curve: dict[float, float] = {}
    for run in runs:
        is_ordinary = run["inner"] == 0 and run["minibatches"] == minibatches
        if is_ordinary and seed in {None, run["seed"]}:
            steps = run["outer"]
            curve[steps] = min(run["final"], curve.get(steps, inf))
    return curve


def judge(runs: Sequence[Run]) -> list[Check]:
    """Return a check of outer steps and two of passes for every inner solver, all seeds at once."""
    grouped: dict[tuple[Any, ...], list[Comparison]] = {}
    for one in compare(runs):
        run = one.run
        key = (run["minibatches"], run["method"], run["inner"], run["outer"])
        grouped.setdefault(key, []).append(one)
    checks: list[Check] = []
    for (minibatches, method, inner, _), seeds in grouped.items():
        subject = f"batches of {minibatches}: {inner} inner steps of {NAMES.get(method, method)}"
        checks += _judge_solver(subject, seeds)
    return checks


def _judge_solver(subject: str, seeds: Sequence[Comparison]) -> list[Check]:
    """Return the checks of one inner solver; a claim holds if it does for every seed."""
    outer = seeds[0].run["outer"]
    passes = seeds[0].run["passes"]
    steps = [one.ordinary for one in seeds]
    holds = all(length.low >= PUBLISHED_RATIO * outer for length in steps)
    claim = f"{subject} take {PUBLISHED_RATIO} times fewer outer steps"
    checks = [_check(claim, holds, f"{outer} beside {_join(steps)}")]
    rivals = {
        "ordinary steps": [one.ordinary_passes for one in seeds],
        "steps on minibatches": [one.small for one in seeds if one.small is not None],
    }
    for rival, lengths in rivals.items():
        if not lengths:
            continue
        holds = all(passes < length.low for length in lengths)
        claim = f"{subject} take fewer passes than {rival}"
        checks.append(_check(claim, holds, f"{passes:.0f} beside {_join(lengths)}"))
    return checks


def _check(claim: str, holds: bool, numbers: str) -> Check:
    return Check(claim, holds, numbers, recorded=claim not in NOT_HOLDING, of_paper=False)


def _join(lengths: Sequence[Length]) -> str:
    return ", ".join(map(str, lengths))


def list_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a table of the first seed's comparisons, with a head.

    The first column has the outer steps and the minibatches of each, the last three the passes of
    the run, of ordinary steps and of steps on minibatches to the same loss.
    """
    rows = [["outer", "inner solver", "loss", "ordinary steps", "passes", "ordinary", "minibatch"]]
    comparisons = compare(runs)
    first = min((one.run["seed"] for one in comparisons), default=0)
    for one in comparisons:
        run = one.run
        if run["seed"] != first:
            continue
        row = [f"{run['outer']}×{run['minibatches']}"]
        row += [f"{run['inner']} of {NAMES.get(run['method'], run['method'])}"]
        row += [f"{run['final']:.3f}", str(one.ordinary), f"{run['passes']:.0f}"]
        row += [str(one.ordinary_passes), str(one.small or "–")]
        rows.append(row)
    return rows
