"""What a run came to, and how it is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from .check import Check, Verdict
from .seeds import ranges
from .tabular import Table

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
