"""Checks: claims that hold or not, with the numbers that decide; and the verdict on a paper."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

from rich.console import Console

from .progress import ranges
from .tabular import Table, count_of

#: a claim, whether it holds, and the numbers
Claim = tuple[str, bool, str]
#: the outcomes of a verdict
Finding = Literal["reproduced", "differs", "not reproduced"]


@dataclass(frozen=True)
class Check:
    """A claim, and whether it holds for the seeds.

    Attributes:
        claim: what the paper says or needs, or what we add, in our words.
        holds: whether it does.
        numbers: those that decided.
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
        """Return True if the check came out as in the full runs."""
        return self.holds == self.recorded

    def __str__(self) -> str:
        verdict = "does not hold"
        if self.holds:
            verdict = "holds"
        if not self.agrees:
            verdict += " (unlike the record)"
        return f"{verdict}: {self.claim} ({self.numbers})"


@dataclass(frozen=True)
class Conclusion:
    """What an experiment says of its paper, and why."""

    outcome: Finding
    why: str

    def __str__(self) -> str:
        return f"{self.outcome}: {self.why}"


def make_checks(
    claims: Iterable[Claim], full_runs: Sequence[bool], ours: Container[int] = ()
) -> list[Check]:
    """Return a check for every claim.

    Args:
        claims: (claim, holds, numbers) of this run.
        full_runs: whether each of them held in the full runs, in the same order.
        ours: the indices of claims that are not the paper's.
    """
    checks = []
    for i, (claim, is_recorded) in enumerate(zip(claims, full_runs, strict=True)):
        checks.append(Check(*claim, recorded=is_recorded, of_paper=i not in ours))
    return checks


def conclude(checks: Sequence[Check]) -> Conclusion | None:
    """Return whether all of the paper's claims hold, some, or none; None without such claims.

    >>> conclude([Check("a", True, "1"), Check("b", False, "2", recorded=False)])
    Conclusion(outcome='differs', why='1 of 2 claims holds; not: b (2)')
    """
    of_paper = [check for check in checks if check.of_paper]
    if not of_paper:
        return None
    failed = [f"{check.claim} ({check.numbers})" for check in of_paper if not check.holds]
    count = len(of_paper) - len(failed)
    sentence = f"{count} of {count_of(len(of_paper), 'claim')} hold"
    if count == 1:
        sentence += "s"
    if not failed:
        return Conclusion("reproduced", sentence)
    outcome: Finding = "not reproduced"
    if count:
        outcome = "differs"
    return Conclusion(outcome, f"{sentence}; not: {'; '.join(failed)}")


class ExitStatus(IntEnum):
    """What `pullback run` returns to the shell."""

    AS_RECORDED = 0
    NOT_AS_RECORDED = 1
    UNFINISHED = 3


#: printed for seeds of the same file that were not asked for
BESIDE = "Seeds {} are finished too and were not asked for"
#: printed for a run that is complete and judged no claim
UNJUDGED = "No claim was judged: this version is too short to tell. The full one does."


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        checks, verdict: of the seeds that are complete.
        finished, total: items, of those that were asked for.
        seeds: complete.
        files: that were written.
        beside: seeds that are complete in the same file and were not asked for.
    """

    checks: tuple[Check, ...]
    verdict: Conclusion | None
    finished: int
    total: int
    seeds: tuple[int, ...]
    files: tuple[Path, ...]
    beside: tuple[int, ...] = ()

    @property
    def status(self) -> ExitStatus:
        """Whether all is done, and every check is as recorded."""
        if self.finished < self.total:
            return ExitStatus.UNFINISHED
        if all(check.agrees for check in self.checks):
            return ExitStatus.AS_RECORDED
        return ExitStatus.NOT_AS_RECORDED


def print_outcome(
    console: Console, outcome: Outcome, tables: Sequence[Table], asked: Sequence[int]
) -> None:
    """Print the tables, the checks, the verdict and the names of the files."""
    for table in tables:
        console.print(table)
    for check in outcome.checks:
        console.print(str(check), soft_wrap=True, markup=False, highlight=False)
    if outcome.verdict is not None:
        console.print(str(outcome.verdict), soft_wrap=True, markup=False, style="bold")
    if outcome.seeds and not outcome.checks:
        console.print(UNJUDGED, soft_wrap=True, style="yellow")
    if outcome.finished < outcome.total:
        items = f"{outcome.finished} of {outcome.total} items"
        partial = f"{items}, {len(outcome.seeds)} of {len(asked)} seeds"
        console.print(f"Unfinished: {partial}; the same command goes on.", style="yellow")
    if outcome.beside:
        seeds = BESIDE.format(ranges(outcome.beside))
        words = f"{seeds}; a run that asks for them too takes them in."
        console.print(words, soft_wrap=True, style="yellow", highlight=False)
    names = ", ".join(map(str, outcome.files))
    console.print(f"Written: {names}", soft_wrap=True, highlight=False, markup=False)
