"""A claim as yes or no with the numbers that decide, and what all of them say of a paper."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from .progress import ranges
from .tabular import Table

#: a claim, whether it holds, and the numbers
Claim = tuple[str, bool, str]
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
    found: Iterable[Claim], held: Sequence[bool], ours: Container[int] = ()
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


#: exit status of a run that has more to do
UNFINISHED = 3
#: said of seeds that lie in the same file
BESIDE = "Seeds {} are finished too and were not asked for"
#: said of a run that went through and tells nothing
UNJUDGED = "No claim was judged: this version is too short to tell. The full one does."


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        checks, verdict: of the seeds that are complete.
        done, total: items, of those that were asked for.
        seeds: complete.
        files: that were written.
        beside: seeds that are complete in the same file and were not asked for.
    """

    checks: tuple[Check, ...]
    verdict: Verdict | None
    done: int
    total: int
    seeds: tuple[int, ...]
    files: tuple[Path, ...]
    beside: tuple[int, ...] = ()

    @property
    def status(self) -> int:
        """0 where all is done and every check is as recorded, 3 where there is more to do."""
        if self.done < self.total:
            return UNFINISHED
        return 0 if all(c.agrees for c in self.checks) else 1


def tell(console: Console, found: Outcome, tables: Sequence[Table], asked: Sequence[int]) -> None:
    """The tables, the checks, the verdict, and where the files are."""
    for table in tables:
        console.print(table)
    for check in found.checks:
        console.print(str(check), soft_wrap=True, markup=False, highlight=False)
    if found.verdict is not None:
        console.print(str(found.verdict), soft_wrap=True, markup=False, style="bold")
    if found.seeds and not found.checks:
        console.print(UNJUDGED, soft_wrap=True, style="yellow")
    if found.done < found.total:
        partial = f"{found.done} of {found.total} items, {len(found.seeds)} of {len(asked)} seeds"
        console.print(f"Unfinished: {partial}; the same command goes on.", style="yellow")
    if found.beside:
        words = (
            f"{BESIDE.format(ranges(found.beside))}; a run that asks for them too takes them in."
        )
        console.print(words, soft_wrap=True, style="yellow", highlight=False)
    names = ", ".join(map(str, found.files))
    console.print(f"Written: {names}", soft_wrap=True, highlight=False, markup=False)
