"""A claim as yes or no with the numbers that decide, and what all of them say of a paper."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

#: what a run says of a paper's claim
Finding = Literal["reproduced", "differs", "not reproduced"]


@dataclass(frozen=True)
class Check:
    """A claim, and what the seeds say.

    Attributes:
        claim: what the paper says or needs, or what we add, in our words.
        holds: whether it does.
        numbers: what decided.
        recorded: whether it held in the full runs; not every claim of a paper does.
        of_paper: whether the paper says so; what we add does not count for the verdict.

    >>> print(Check("two is even", True, "2 = 2·1"))
    holds: two is even (2 = 2·1)
    >>> print(Check("two is odd", True, "?", recorded=False))
    holds (unlike the record): two is odd (?)
    """

    claim: str
    holds: bool
    numbers: str
    recorded: bool = True
    of_paper: bool = True

    def __post_init__(self) -> None:
        # comparisons of arrays give booleans that no file can hold
        object.__setattr__(self, "holds", bool(self.holds))

    @property
    def agrees(self) -> bool:
        """Whether it came out as in the full runs."""
        return self.holds == self.recorded

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "does not hold"
        surprise = "" if self.agrees else " (unlike the record)"
        return f"{verdict}{surprise}: {self.claim} ({self.numbers})"


@dataclass(frozen=True)
class Verdict:
    """What an experiment says of its paper, and why."""

    outcome: Finding
    why: str

    def __str__(self) -> str:
        return f"{self.outcome}: {self.why}"


def recorded(
    found: Iterable[tuple[str, bool, str]], held: Sequence[bool], ours: Container[int] = ()
) -> list[Check]:
    """(claim, holds, numbers) of every check, beside what the full runs gave, in that order.

    The claims at the places `ours` are not the paper's.
    """
    both = enumerate(zip(found, held, strict=True))
    return [Check(*one, recorded=was, of_paper=place not in ours) for place, (one, was) in both]


def concluded(checks: Sequence[Check]) -> Verdict | None:
    """All of the paper's claims hold, some, or none; None where nothing was judged.

    >>> concluded([Check("a", True, "1"), Check("b", False, "2", recorded=False)])
    Verdict(outcome='differs', why='1 of 2 claims holds; not: b (2)')
    """
    asked = [c for c in checks if c.of_paper]
    if not asked:
        return None
    failed = [f"{c.claim} ({c.numbers})" for c in asked if not c.holds]
    count = len(asked) - len(failed)
    verb = "holds" if count == 1 else "hold"
    claims = "claim" if len(asked) == 1 else "claims"
    if not failed:
        return Verdict("reproduced", f"{count} of {len(asked)} {claims} {verb}")
    outcome: Finding = "differs" if count else "not reproduced"
    return Verdict(outcome, f"{count} of {len(asked)} {claims} {verb}; not: {'; '.join(failed)}")
