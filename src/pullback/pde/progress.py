"""A line that shows how a solve is getting on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Line:
    """Updated after every step."""

    def __init__(self, progress: Progress | None, task: int) -> None:
        self._progress, self._task = progress, task

    def __call__(self, step: int, loss: float, fresh: float, error: float) -> None:
        """One more step."""
        if self._progress is not None:
            numbers = {"loss": loss, "fresh": fresh, "error": error}
            known = [f"{n} {v:.1e}" for n, v in numbers.items() if not math.isnan(v)]
            text = "  ".join(known)
            self._progress.update(self._task, completed=step, state=text)  # pyright: ignore[reportArgumentType]


@contextmanager
def shown(title: str, steps: int, *, enabled: bool) -> Iterator[Line]:
    """A progress bar on the terminal's error stream, or none."""
    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        yield Line(None, 0)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(24),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        yield Line(progress, progress.add_task(title, total=steps, state=""))
