"""`python -m pullback_experiments.demo`: the natural gradient beside SGD, Adam and L-BFGS.

Every optimizer starts from the same network and gets the same time on one thread. Settings are
the best of a small grid at that time; `--tune` repeats the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from pullback.cli.files import make_folder
from pullback.cli.terminal import replace_unknown_characters

from .commands import report
from .framework import executor
from .framework.check import Outcome
from .framework.environment import environment
from .showcase.display import format_measure, format_settings, progress
from .showcase.experiment import Demonstration, budget, problems, table
from .showcase.problem import DemoProblem
from .showcase.race import Curve, run, tune


def compete(console: Console, problem: DemoProblem, seconds: float) -> list[Curve]:
    """Return one run of every contender."""
    curves = []
    with progress(console, problem, seconds) as watcher:
        for contender in problem.contenders:
            watch = watcher(contender)
            curves.append(run(problem, contender, seconds=seconds, watch=watch))
    return curves


def search(console: Console, problem: DemoProblem) -> None:
    """Print the final measures of all points of every grid, best first, and the point in use."""
    for contender in problem.contenders:
        if contender.grid:
            ends = tune(problem, contender, seconds=problem.seconds)
            tried = "; ".join(
                f"{format_settings(at)}: {format_measure('', end)}" for at, end in ends
            )
            name = (
                f"{problem.title}, {contender.name} ({format_settings(contender.settings)} in use)"
            )
            console.print(f"{name}\n  {tried}", soft_wrap=True)


def save_runs(out: Path, quick: bool, races: Sequence[tuple[DemoProblem, list[Curve]]]) -> Outcome:
    """Save the runs in the place of older ones, as the experiment would; its figure too."""
    demonstration = Demonstration()
    (out / f"{demonstration.stem(quick)}.json").unlink(missing_ok=True)
    store = demonstration.open_store(quick, make_folder(out))
    current_environment = environment()
    for problem, curves in races:
        for curve in curves:
            name = ((problem.title, curve.name), demonstration.seeds[0])
            store.put(name, curve.as_dict(), curve.seconds[-1], current_environment)
    return executor.run(demonstration, quick, out=out)


def main(
    quick: Annotated[bool, typer.Option(help="A few seconds in all, for a smoke test.")] = False,
    repeat_search: Annotated[
        bool, typer.Option("--tune", help="Run every point of the grids and stop.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of results, figures and page.")] = Path("demo"),
) -> None:
    """Train three small problems with torch's optimizers and with the natural gradient."""
    replace_unknown_characters()
    console = Console(highlight=False)
    torch.set_num_threads(1)  # such small matrices gain nothing from more
    available, missing = problems()
    for words in missing:
        console.print(f"Skipped: {words}", style="yellow", markup=False)
    if repeat_search:
        for problem in available:
            search(console, problem)
        return
    races = [(p, compete(console, p, budget(p, quick))) for p in available]
    for problem, curves in races:
        console.print()
        console.print(table(problem, curves))
    figures = [str(path) for path in save_runs(out, quick, races).files[1:]]
    figures += save_pictures(races, out)
    console.print(f"\nFigures: {', '.join(figures)}", soft_wrap=True)
    console.print(f"Page: {report.write(out)[0]}", soft_wrap=True)


def save_pictures(races: Sequence[tuple[DemoProblem, list[Curve]]], out: Path) -> list[str]:
    """Save what the trained networks give, for problems that draw it; return the files."""
    files = []
    for problem, curves in races:
        picture = problem.picture({c.name: c.model for c in curves if c.model}, out)
        if picture:
            files.append(str(picture))
    return files


if __name__ == "__main__":
    typer.run(main)
