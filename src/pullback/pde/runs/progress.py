"""How a solve is getting on: a bar on terminals and in notebooks, else a line now and then.

Without rich there are only lines.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

#: seconds between two plain lines
_SECONDS_BETWEEN_LINES = 10.0
#: seconds of a run that is worth a forecast
_FORECAST_SECONDS = 30.0


class ProgressLine:
    """Updated after every step; this one shows nothing."""

    def __call__(self, step: int, **numbers: float) -> None:
        """Show one more step, with numbers by name."""

    def say(self, text: str) -> None:
        """Show one sentence."""

    def forecast(self, steps: int, seconds: float, budget: float, jacobian: int) -> None:
        """Say after the first step what so many more will take, where that is long.

        Args:
            steps, seconds: how many more, and what the first one took.
            budget: seconds that are left.
            jacobian: its bytes.
        """
        total = steps * seconds
        if total < _FORECAST_SECONDS:
            return
        sentence = f"{steps} steps of {seconds:.2g} s: about {duration(total)}"
        if budget < total:
            sentence += f", of which the budget allows about {int(budget / seconds)}"
        if jacobian:
            sentence += f", {jacobian / 2**30:.2g} GiB for the Jacobian"
        self.say(sentence)


class Bar(ProgressLine):
    """A bar with the time that is left."""

    def __init__(self, progress: Progress, title: str, steps: int) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=steps, state="")

    def __call__(self, step: int, **numbers: float) -> None:
        self._progress.update(self._task, completed=step, state=_format_numbers(numbers))  # pyright: ignore[reportArgumentType]

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)


class Log(ProgressLine):
    """A plain line every ten seconds."""

    def __init__(self, file: IO[str], title: str, steps: int) -> None:
        self._file = file
        self._title = title
        self._steps = steps
        self._start = self._last = time.monotonic()

    def __call__(self, step: int, **numbers: float) -> None:
        seconds = time.monotonic()
        if seconds - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = seconds
            spent = duration(seconds - self._start)
            self.say(f"step {step}/{self._steps}  {_format_numbers(numbers)}  after {spent}")

    def say(self, text: str) -> None:
        print(f"{self._title}: {text}", file=self._file, flush=True)


@contextmanager
def show_progress(title: str, steps: int, *, enabled: bool) -> Iterator[ProgressLine]:
    """Progress on the error stream, or none."""
    if not enabled:
        yield ProgressLine()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield Log(sys.stderr, title, steps)
        return
    console = Console(stderr=True)
    if not console.is_terminal and not console.is_jupyter:
        yield Log(sys.stderr, title, steps)
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
        yield Bar(progress, title, steps)


def _format_numbers(numbers: dict[str, float]) -> str:
    return "  ".join(f"{n} {v:.1e}" for n, v in numbers.items() if not math.isnan(v))


def duration(seconds: float) -> str:
    """Return a duration in a unit that fits it.

    >>> duration(0.25), duration(40), duration(400), duration(10_000)
    ('0.25 s', '40 s', '7 min', '2.8 h')
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
