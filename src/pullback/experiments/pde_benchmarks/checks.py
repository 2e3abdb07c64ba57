"""What the set says, as yes or no."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from ..framework.check import Check
from ..framework.plain import Record
from ..framework.quantiles import finite
from .methods import ADAM, GAUSS_NEWTON, LBFGS

#: records, one per seed, by problem and method
Found = Mapping[str, Mapping[str, Sequence[Record]]]
AHEAD = 10.0  # times smaller


def claims(found: Found, targets: Mapping[str, float]) -> list[Check]:
    """Ahead of first-order methods, which is ours; where there are targets, as good as reported."""
    known = [problem for problem in found if problem in targets]
    return [_ahead(found), *([_accurate(found, targets, known)] if known else [])]


def final(records: Sequence[Record]) -> float:
    """The median over seeds of the last error, ∞ where it was lost."""
    return median(finite(r["error"][-1]) for r in records)


def reached(records: Sequence[Record], target: float) -> float:
    """The median over seeds of the seconds until an error was at most this, ∞ where never."""

    def one(record: Record) -> float:
        pairs = zip(record["error"], record["seconds"], strict=True)
        return next((t for e, t in pairs if e <= target), math.inf)

    return median(one(r) for r in records)


def _ahead(found: Found) -> Check:
    ratios = {
        problem: min(final(by[ADAM]), final(by[LBFGS])) / max(final(by[GAUSS_NEWTON]), 1e-300)
        for problem, by in found.items()
    }
    least = min(ratios, key=ratios.__getitem__)
    held = sum(r >= AHEAD for r in ratios.values())
    claim = f"after the same seconds Gauss–Newton's error is {AHEAD:g} times below Adam's, L-BFGS's"
    numbers = f"{held} of {len(ratios)} problems; the least is {ratios[least]:.1e} for {least}"
    return Check(claim, held == len(ratios), numbers, of_paper=False)


def _accurate(found: Found, targets: Mapping[str, float], known: Sequence[str]) -> Check:
    missed = [p for p in known if final(found[p][GAUSS_NEWTON]) > targets[p]]
    numbers = f"{len(known) - len(missed)} of {len(known)} problems"
    if missed:
        numbers += "; not " + ", ".join(
            f"{p} ({final(found[p][GAUSS_NEWTON]):.1e})" for p in missed
        )
    return Check("Gauss–Newton reaches the reported errors", not missed, numbers)
