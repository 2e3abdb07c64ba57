"""The paper's claims as yes or no, with the numbers that decide."""

from __future__ import annotations

from collections.abc import Sequence

from ..framework.check import Check, recorded
from .statistics import Summary

SOLVED = 0.1  # relative error at which a run counts as having got somewhere
EARLY = 30  # steps

#: a claim, whether it holds, and the numbers
Verdict = tuple[str, bool, str]


def least_squares_claims(found: dict[str, Summary], size: int, held: Sequence[bool]) -> list[Check]:
    """What section 2.1 shows and section 1.1 promises, for p = size parameters."""
    full, greedy, damped = (found[m] for m in ("NGD", "NGD-OGA", "NGD-OGA, damped"))
    return recorded(
        [
            _singular(full, size),
            _nearly_best(full),
            _faster("NGD-OGA", greedy, "NGD", full),
            _safer("NGD-OGA", greedy, "NGD", full),
            _as_accurate("NGD-OGA", greedy, "NGD", full),
            _cheaper("NGD-OGA", greedy, "NGD", full),
            _never_stuck("NGD-OGA", greedy),
            _never_stuck("NGD-OGA, damped", damped),
        ],
        held,
        ours={7},
    )


def poisson_claims(found: dict[str, Summary], size: int, held: Sequence[bool]) -> list[Check]:
    """What section 2.2 says, for p = size parameters."""
    cut, greedy, plain = (found[m] for m in ("E-NGD", "E-NGD-OGA", "E-NGD, not cut"))
    first, pretrained = cut.first("largest"), found["E-NGD, pre-trained"]
    return recorded(
        [
            _singular(plain, size),
            ("the first directions are astronomical", first > 1e6, f"an entry of {first:.0e}"),
            ("E-NGD sometimes sticks at a large loss", cut.below(SOLVED) < len(cut), _got(cut)),
            _nearly_best(cut),
            _safer("E-NGD-OGA", greedy, "E-NGD", cut),
            _as_accurate("E-NGD-OGA", greedy, "E-NGD, not cut", plain),
            _cheaper("E-NGD-OGA", greedy, "E-NGD, not cut", plain),
            _safer("E-NGD", cut, "E-NGD, not cut", plain),
            _safer("E-NGD, pre-trained", pretrained, "E-NGD", cut),
            _small("E-NGD, pre-trained", pretrained),
            _safer("E-NGD, backtracking", found["E-NGD, backtracking"], "E-NGD", cut),
            _safer("E-NGD, from rows", found["E-NGD, from rows"], "E-NGD, not cut", plain),
        ],
        held,
        ours={11},
    )


def _got(summary: Summary) -> str:
    return f"{summary.below(SOLVED)} of {len(summary)} below {SOLVED:g}"


def _singular(full: Summary, size: int) -> Verdict:
    rank = full.median("rank")
    return "the Gram is singular to working precision", rank < size, f"rank {rank:g} of {size}"


def _nearly_best(full: Summary) -> Verdict:
    share = full.median("share")
    claim = "greedily chosen vectors keep nine tenths of the energy of the full direction"
    return claim, share >= 0.9, f"median {share:.2f}"


def _faster(one: str, first: Summary, two: str, second: Summary) -> Verdict:
    a, b = first.after(EARLY), second.after(EARLY)
    claim = f"{one} lowers the loss faster than {two} in {EARLY} steps"
    return claim, a < b, f"median loss {a:.1e} against {b:.1e}"


def _safer(one: str, first: Summary, two: str, second: Summary) -> Verdict:
    claim = f"{one} gets somewhere from more seeds than {two}"
    holds = first.below(SOLVED) > second.below(SOLVED)
    return claim, holds, f"{_got(first)}, against {_got(second)}"


def _as_accurate(one: str, first: Summary, two: str, second: Summary) -> Verdict:
    a, b = min(first.errors), min(second.errors)
    claim = f"the best run of {one} is as accurate as that of {two}, within a factor of ten"
    return claim, a <= 10 * b, f"errors {a:.1e} and {b:.1e}"


def _cheaper(one: str, first: Summary, two: str, second: Summary) -> Verdict:
    a, b = 1e3 * first.per_step, 1e3 * second.per_step
    claim = f"a step of {one} costs less than half of one of {two}"
    return claim, a < 0.5 * b, f"{a:.0f} and {b:.0f} ms"


def _small(name: str, summary: Summary) -> Verdict:
    first = summary.first("largest")
    return f"the first direction of {name} is moderate", first < 10, f"an entry of {first:.0e}"


def _never_stuck(name: str, summary: Summary) -> Verdict:
    holds = summary.stuck == 0
    return f"{name} never gets stuck", holds, f"{summary.stuck} of {len(summary)} did"
