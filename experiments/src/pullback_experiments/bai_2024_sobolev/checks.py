"""The paper's claims on VGG-16 as yes or no."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..framework.check import Check, recorded
from ..framework.plain import Record
from .curves import clearly_fewer, counted, epochs, final

LEVELS = {"train loss": (0.5, 0.1), "test accuracy": (0.8, 0.9)}
SIMILAR = 0.01  # of test accuracies

#: the records of every method, one per seed
Found = Mapping[str, Sequence[Record]]
Verdict = tuple[str, bool, str]


def paper_claims(found: Found, held: Sequence[bool]) -> list[Check]:
    """Faster, as good in the end, and not by schedule or scaling; then, by the metric alone?"""
    ours, theirs = found["Sobolev"], found["K-FAC"]
    claims = [
        _sooner("Sobolev", ours, "K-FAC", theirs, measure, level)
        for measure, levels in LEVELS.items()
        for level in levels
    ]
    claims += [_similar(ours, theirs), _no_benefit(found)]
    same = found["Sobolev − schedule"]
    claims.append(_sooner("Sobolev − schedule", same, "K-FAC", theirs, "train loss", 0.1))
    both = found["K-FAC + both"]
    claims.append(_sooner("Sobolev", ours, "K-FAC + both", both, "train loss", 0.1))
    return recorded(claims, held, ours={6, 7})


def _sooner(
    one: str, a: Sequence[Record], two: str, b: Sequence[Record], measure: str, level: float
) -> Verdict:
    first, second = epochs(a, measure, level), epochs(b, measure, level)
    claim = f"{one} needs clearly fewer epochs than {two} to a {measure} of {level:g}"
    return claim, clearly_fewer(first, second), f"{counted(first)} and {counted(second)}"


def _similar(a: Sequence[Record], b: Sequence[Record]) -> Verdict:
    one, two = final(a, "test accuracy"), final(b, "test accuracy")
    claim = "the final test accuracies of Sobolev and K-FAC are similar, within a point"
    return claim, abs(one - two) <= SIMILAR, f"{one:.4f} and {two:.4f}"


def _no_benefit(found: Found) -> Verdict:
    plain = final(found["K-FAC"], "test accuracy")
    variants = ("K-FAC + schedule", "K-FAC + scaling", "K-FAC + both")
    best = max(variants, key=lambda m: final(found[m], "test accuracy"))
    value = final(found[best], "test accuracy")
    claim = "neither schedule nor scaling raises K-FAC's final test accuracy by half a point"
    return claim, value < plain + 0.005, f"{plain:.4f} plain, {value:.4f} for {best}"
