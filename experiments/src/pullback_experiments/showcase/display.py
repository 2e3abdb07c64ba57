"""Live progress of the runs of one problem, and the closing table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .contender import Contender
from .problem import Problem
from .race import Curve, Watcher


def described(settings: Mapping[str, float]) -> str:
    """The settings in a few characters, or that nothing was tuned."""
    return ", ".join(f"{k} {v:g}" for k, v in settings.items()) or "untuned"


def shown(name: str, value: float) -> str:
    """A measure for people: accuracies in percent, all else in powers of ten.

    >>> shown("test accuracy", 0.98), shown("training loss", 0.00034)
    ('98.0 %', '3.4e-4')
    """
    if "accuracy" in name:
        return f"{100 * value:.1f} %"
    if not math.isfinite(value):
        return str(value)
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


@contextmanager
def progress(
    console: Console, problem: Problem, seconds: float
) -> Iterator[Callable[[Contender], Watcher]]:
    """One bar per contender with its loss and the time left; plain lines without a terminal."""
    console.print(f"[bold]{problem.title}[/bold], {seconds:g} s for each optimizer")
    if not console.is_terminal:
        yield lambda contender: _announced(console, contender)
        return
    bars = Progress(
        TextColumn("  {task.description:<16}"),
        BarColumn(bar_width=30),
        TextColumn("loss {task.fields[loss]:>8}"),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
    )
    with bars:
        tasks = {
            c.name: bars.add_task(c.name, start=False, total=1.0, loss="-")
            for c in problem.contenders
        }

        def watcher(contender: Contender) -> Watcher:
            task = tasks[contender.name]
            bars.reset(task, total=1.0, loss="-")
            return lambda share, loss: bars.update(task, completed=share, loss=f"{loss:.1e}")

        yield watcher


def _announced(console: Console, contender: Contender) -> Watcher:
    """A line when a run starts, and one when it ends."""
    console.print(f"  {contender.name}: running")

    def watch(share: float, loss: float) -> None:
        if share >= 1.0:
            console.print(f"  {contender.name}: done, loss {loss:.1e}")

    return watch


def results(problem: Problem, curves: Sequence[Curve]) -> Table:
    """Optimizer, settings, steps, seconds, and the final measures; the best in bold."""
    table = Table(title=problem.title, title_justify="left", title_style="bold")
    names = list(curves[0].measures[-1])
    table.add_column("optimizer", no_wrap=True)
    table.add_column("settings")
    for column in ("steps", "seconds", *names):
        table.add_column(column, justify="right")
    best = min(curve.values()[-1] for curve in curves)
    settings = {c.name: described(c.settings) for c in problem.contenders}
    for curve in curves:
        table.add_row(
            curve.name,
            settings[curve.name],
            f"{curve.steps[-1]:,}",
            f"{curve.seconds[-1]:.1f}",
            *(shown(name, curve.measures[-1][name]) for name in names),
            style="bold" if curve.values()[-1] == best else None,
        )
    return table
