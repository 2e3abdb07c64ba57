"""`python -m pullback.experiments.demo`: the natural gradient beside SGD, Adam and L-BFGS.

Every optimizer starts from the same network and gets the same time on one thread. Settings are
the best of a small grid at that time; `--tune` repeats the search.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .._core.errors import PullbackError
from .showcase.display import described, progress, results, shown
from .showcase.figure import draw
from .showcase.problem import Problem
from .showcase.race import Curve, run, tune
from .showcase.table import PROBLEMS

_QUICK = 0.3  # seconds per run of a smoke test


def compete(console: Console, problem: Problem) -> list[Curve]:
    """One run of every contender."""
    curves = []
    with progress(console, problem) as watcher:
        for contender in problem.contenders:
            watch = watcher(contender)
            curves.append(run(problem, contender, seconds=problem.seconds, watch=watch))
    return curves


def search(console: Console, problem: Problem) -> None:
    """What every point of every grid ends with, best first, and the point in use."""
    for contender in problem.contenders:
        if contender.grid:
            ends = tune(problem, contender, seconds=problem.seconds)
            tried = "; ".join(f"{described(at)}: {shown('', end)}" for at, end in ends)
            name = f"{problem.title}, {contender.name} ({described(contender.settings)} in use)"
            console.print(f"{name}\n  {tried}", soft_wrap=True)


def problems(console: Console, quick: bool) -> list[Problem]:
    """The problems of the table whose data can be had."""
    found = []
    for make in PROBLEMS.values():
        try:
            found.append(make())
        except PullbackError as error:
            console.print(f"[yellow]Skipped:[/yellow] {error}")
    for problem in found:
        problem.seconds = _QUICK if quick else problem.seconds
    return found


def main(
    quick: Annotated[bool, typer.Option(help="A few seconds in all, for a smoke test.")] = False,
    repeat_search: Annotated[
        bool, typer.Option("--tune", help="Run every point of the grids and stop.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the figure.")] = Path("demo"),
) -> None:
    """Train three small problems with torch's optimizers and with the natural gradient."""
    console = Console(highlight=False)
    torch.set_num_threads(1)  # such small matrices gain nothing from more
    races = []
    for problem in problems(console, quick):
        if repeat_search:
            search(console, problem)
        else:
            races.append((problem, compete(console, problem)))
    if repeat_search:
        return
    for problem, curves in races:
        console.print()
        console.print(results(problem, curves))
    drawn = [draw(races, out / "demo.png")]
    for problem, curves in races:
        drawn += [problem.picture({c.name: c.model for c in curves}, out)]
    console.print(f"\nFigures: {', '.join(str(p) for p in drawn if p)}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
