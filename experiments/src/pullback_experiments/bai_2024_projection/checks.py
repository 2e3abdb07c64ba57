"""The laws of the projection view as yes or no."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..framework.check import Check, recorded
from ..framework.results import Results
from .moves import METHODS

Verdict = tuple[str, bool, str]
SMALL = 0.1  # largest |Δf| up to which the order is fitted


def slope(x: Sequence[float], y: Sequence[float], most: float = SMALL) -> float:
    """The exponent a of y ∝ xᵃ, fitted where x ≤ most.

    >>> round(slope([0.1, 0.01], [3e-2, 3e-4]), 9)
    2.0
    """
    pairs = [
        (math.log(a), math.log(max(b, 1e-300))) for a, b in zip(x, y, strict=True) if a <= most
    ]
    u, v = (sum(p[i] for p in pairs) / len(pairs) for i in (0, 1))
    return sum((a - u) * (b - v) for a, b in pairs) / sum((a - u) ** 2 for a, _ in pairs)


def judged(results: Results, held: Sequence[bool]) -> list[Check]:
    """All of them; the order of the error is what we add."""
    both = [r for name in ("wide", "narrow") for r in results.of(name)]
    claims = [
        _at_most(both, "forms", 1e-8, "the three forms of P∇ℓ agree at points without data"),
        _at_most(both, "P twice", 1e-8, "P² = P"),
        _least(both, "S twice", 0.1, "S² ≠ S: the standard gradient is no projection"),
        _at_most(both, "orthogonal", 1e-7, "∇ℓ − P∇ℓ is orthogonal to the tangent space"),
        _at_most(
            results.of("wide"), "smoothed", 1e-6, "wide: a Sobolev step moves the data by −ηK∇ℓ"
        ),
        _order(both),
        *_resolution(results),
    ]
    return recorded(claims, held, ours={5})


def _at_most(records: Sequence[dict], law: str, most: float, claim: str) -> Verdict:
    worst = max(r["laws"][law] for r in records)
    return claim, worst <= most, f"{worst:.0e}, relative, at most"


def _least(records: Sequence[dict], law: str, least: float, claim: str) -> Verdict:
    smallest = min(r["laws"][law] for r in records)
    return claim, smallest >= least, f"they differ by {smallest:.2g}, relative, at least"


def _order(records: Sequence[dict]) -> Verdict:
    found = [slope(r["moves"][m]["size"], r["moves"][m]["error"]) for r in records for m in METHODS]
    claim = "the move is predicted up to an error ∝ η²"
    holds = all(abs(a - 2) <= 0.15 for a in found)
    return claim, holds, f"exponents {min(found):.3f} to {max(found):.3f}"


def _resolution(results: Results) -> list[Verdict]:
    record = results.once("resolution")
    n, norms = record["resolution"], record["norms"]
    growth = slope(n, norms["0"], math.inf)
    border = norms["0.5"][-1] / norms["0.5"][len(n) // 2]
    change = {s: abs(norms[s][-1] / norms[s][-2] - 1) for s in ("1", "2")}
    return [
        ("in L² ‖∇ℓ‖ grows as √n without end", abs(growth - 0.5) < 0.01, f"as n^{growth:.3f}"),
        (
            "for s = 1/2, half the dimension, it still grows",
            border > 1.1,
            f"by a factor {border:.2f} from n = {n[len(n) // 2]} to {n[-1]}",
        ),
        (
            "for s = 1 and s = 2 it converges",
            max(change.values()) < 1e-3,
            f"the last doubling changes it by {change['1']:.0e} and {change['2']:.0e}",
        ),
    ]
