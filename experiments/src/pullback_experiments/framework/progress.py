"""Progress of an experiment with the time left; how items, seeds and seconds are written."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from pullback import PullbackError

from .store import Key, Name


@dataclass(frozen=True)
class ProgressLimits:
    """How often lines are printed, and which seeds are accepted."""

    #: seconds between lines without a terminal, unless an item took longer
    line_interval: float = 15.0
    #: seeds of a run at most: more are a slip of the pen
    most_seeds: int = 10_000
    #: the largest seed that torch takes
    largest_seed: int = 2**63 - 1


_LIMITS = ProgressLimits()


class Progress:
    """A bar over the items, and a line for the result of each."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._finished = 0
        self._left = 0.0
        self._last = 0.0
        self._bars = Bars(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bars.add_task(escape(title), total=total, words="", left="")

    def __enter__(self) -> Progress:
        self._bars.__enter__()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.__exit__(error_type, error, trace)

    def start(self, finished: int) -> None:
        """Set the number of items that are done already."""
        self._finished = finished
        self._bars.update(self._task, completed=finished)
        if finished:
            self._print(f"{self._title}: {finished} of {self._total} items are there already")

    @contextmanager
    def item(self, name: Name, left: float) -> Iterator[Callable[[float, str], None]]:
        """Show an item that is under way; its work calls the function with (share, words)."""
        self._left = left
        self._show(0.0, format_name(name), left)
        start = time.monotonic()

        def watch(share: float, words: str) -> None:
            spent = time.monotonic() - start
            # this item's remainder by its own pace, that of others by what they took before
            remainder = 0.0
            if share > 0:
                remainder = spent * (1 - share) / share
            self._show(share, f"{format_name(name)}, {words}", max(left - spent, remainder))

        yield watch

    def busy(self, words: str, left: float) -> None:
        """Show several items that are under way."""
        self._left = left
        self._show(0.0, words, left)

    def _show(self, share: float, words: str, left: float) -> None:
        clock = ""
        if left:
            clock = f"{format_duration(left)} left"
        completed = self._finished + share
        self._bars.update(self._task, completed=completed, words=escape(words), left=clock)

    def said(self, name: Name, took: float, line: str) -> None:
        """Count an item that is done, and print its line; without a terminal not too often."""
        self._finished += 1
        is_last = self._finished == self._total
        time_of_line = time.monotonic()
        interval = _LIMITS.line_interval
        is_soon = time_of_line - self._last < interval and took < interval
        if is_soon and not is_last and not self._console.is_terminal:
            return
        self._last = time_of_line
        text = f"[{self._finished}/{self._total}] {format_name(name)}: {format_duration(took)}"
        if line:
            text += f", {line}"
        left = max(self._left - took, 0.0)
        if left and not is_last:
            text += f"; {format_duration(left)} left"
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Estimates:
    """Estimated seconds of items by key: as for other seeds, else the mean of all items.

    >>> guess = Estimates([("a",), ("a",), ("b",)])
    >>> guess.left()
    0.0
    >>> guess.took(("a",), 2.0)
    >>> guess.of(("a",)), guess.of(("b",)), guess.left()
    (2.0, 2.0, 4.0)
    """

    def __init__(self, missing: Iterable[Key]) -> None:
        self._missing = Counter(missing)
        self._known: dict[Key, list[float]] = defaultdict(list)
        self._sum = 0.0
        self._count = 0

    def know(self, key: Key, seconds: float | None) -> None:
        """Add the seconds of an item that was done before."""
        if seconds is not None:
            self._known[key].append(seconds)
            self._sum += seconds
            self._count += 1

    def took(self, key: Key, seconds: float) -> None:
        """Add the seconds of an item that was missing and is done."""
        self._missing[key] -= 1
        self.know(key, seconds)

    def of(self, key: Key) -> float:
        """Return the seconds that an item will take; 0 where nothing is known."""
        if key in self._known:
            return statistics.median(self._known[key])
        if self._count:
            return self._sum / self._count
        return 0.0

    def left(self) -> float:
        """Return the seconds of all missing items."""
        return sum(count * self.of(key) for key, count in self._missing.items() if count)


def format_name(name: Name) -> str:
    """Return an item's name in words.

    >>> format_name((("tanh MLP", "Adam"), 3)), format_name((("search",), None))
    ('tanh MLP, Adam, seed 3', 'search')
    """
    key, seed = name
    words = list(key)
    if seed is not None:
        words.append(f"seed {seed}")
    return ", ".join(words)


def format_duration(seconds: float) -> str:
    """Return seconds in words.

    >>> format_duration(0.25), format_duration(75), format_duration(7260)
    ('0.2 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 60:
        if seconds < 10:
            return f"{seconds:.1f} s"
        return f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def seed_range(text: str) -> list[int]:
    """Return the seeds that a text lists.

    >>> seed_range("0-3"), seed_range("1,4,7-8")
    ([0, 1, 2, 3], [1, 4, 7, 8])
    """
    seeds: list[int] = []
    for entry in text.split(","):
        ends = entry.split("-")
        if len(ends) > 2 or not all(end.strip().isdecimal() for end in ends):
            raise _refusal(text, f"{entry!r} is no range")
        first = int(ends[0])
        last = int(ends[-1])
        if last > _LIMITS.largest_seed:
            raise _refusal(text, f"{last} is larger than {_LIMITS.largest_seed}")
        if last < first:
            raise _refusal(text, f"{entry!r} ends before it begins")
        if last - first + len(seeds) >= _LIMITS.most_seeds:
            raise _refusal(text, f"there are more than {_LIMITS.most_seeds:,}")
        seeds += range(first, last + 1)
    return seeds


def ranges(seeds: Sequence[int]) -> str:
    """Return seeds as people write them.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []  # [first] or [first, last]
    for seed in sorted(seeds):
        if runs and seed == runs[-1][-1] + 1:
            runs[-1][1:] = [seed]
        else:
            runs.append([seed])
    return ",".join("-".join(map(str, ends)) for ends in runs)


def _refusal(text: str, why: str) -> PullbackError:
    return PullbackError(f"The seeds {text!r} cannot be read", why, "Write 0-9 or 0,3,5")
