"""What the set says, as yes or no."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

from ..framework.check import Check
from ..framework.plain import Record
from ..framework.quantiles import finite
from .methods import ADAM, GAUSS_NEWTON, LBFGS

#: records, one per seed, by problem and method
Found = Mapping[str, Mapping[str, Sequence[Record]]]
AHEAD = 10.0  # times smaller


def claims(found: Found, targets: Mapping[str, float], missed: Collection[str] = ()) -> list[Check]:
    """Ahead of first-order methods, which is ours; where there is a target, as good as reported."""
    out = [replace(_ahead(found), recorded=not set(missed) & found.keys())]
    for problem, by in found.items():
        if problem in targets:
            check = _accurate(problem, by[GAUSS_NEWTON], targets[problem])
            out.append(replace(check, recorded=problem not in missed))
    return out


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


def _accurate(problem: str, records: Sequence[Record], target: float) -> Check:
    found, seconds = final(records), reached(records, target)
    numbers = f"{found:.1e}" + (f", reached in {seconds:.0f} s" if seconds < math.inf else "")
    return Check(f"Gauss–Newton solves {problem} to {target:.1e}", found <= target, numbers)
