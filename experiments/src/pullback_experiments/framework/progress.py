"""Progress of an experiment with the time left; how items, seeds and seconds are written."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars

from pullback import PullbackError

from .store import Key, Name

_EVERY = 15.0  # seconds between lines without a terminal, unless an item took longer


class Progress:
    """A bar over the items, and a line for what each gave."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._done = 0
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
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.__exit__(kind, error, trace)

    def start(self, done: int) -> None:
        """So many are done already."""
        self._done = done
        self._bars.update(self._task, completed=done)
        if done:
            self._print(f"{self._title}: {done} of {self._total} items are there already")

    @contextmanager
    def item(self, name: Name, left: float) -> Iterator[Callable[[float, str], None]]:
        """While one works; (share, words) tells how far it is."""
        self._left = left
        self._show(0.0, spoken(name), left)
        begun = time.monotonic()

        def watch(share: float, words: str) -> None:
            spent = time.monotonic() - begun
            # what is left of this item by its own pace, of the others by what they took before
            if share > 0:
                own = spent * (1 - share) / share
            else:
                own = 0.0
            self._show(share, f"{spoken(name)}, {words}", max(left - spent, own))

        yield watch

    def busy(self, words: str, left: float) -> None:
        """While several work."""
        self._left = left
        self._show(0.0, words, left)

    def _show(self, share: float, words: str, left: float) -> None:
        if left:
            clock = f"{clocked(left)} left"
        else:
            clock = ""
        done = self._done + share
        self._bars.update(self._task, completed=done, words=escape(words), left=clock)

    def said(self, name: Name, took: float, line: str) -> None:
        """One is done."""
        self._done += 1
        last = self._done == self._total
        now = time.monotonic()
        if not self._console.is_terminal and not last and now - self._last < _EVERY > took:
            return
        self._last = now
        left = max(self._left - took, 0.0)
        if last or not left:
            more = ""
        else:
            more = f"; {clocked(left)} left"
        if line:
            words = f", {line}"
        else:
            words = ""
        count = f"[{self._done}/{self._total}]"
        self._print(f"{count} {spoken(name)}: {clocked(took)}{words}{more}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Estimates:
    """Seconds of items by key: as for other seeds, else as others on average.

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
        """An item that was done before."""
        if seconds is not None:
            self._known[key].append(seconds)
            self._sum = self._sum + seconds
            self._count = self._count + 1

    def took(self, key: Key, seconds: float) -> None:
        """One of those that were missing is done."""
        self._missing[key] -= 1
        self.know(key, seconds)

    def of(self, key: Key) -> float:
        """Seconds that an item will take; 0 where nothing is known."""
        if key in self._known:
            return statistics.median(self._known[key])
        if self._count:
            return self._sum / self._count
        return 0.0

    def left(self) -> float:
        """Seconds of all that is missing."""
        return sum(count * self.of(key) for key, count in self._missing.items() if count)


def spoken(name: Name) -> str:
    """An item in words.

    >>> spoken((("tanh MLP", "Adam"), 3)), spoken((("search",), None))
    ('tanh MLP, Adam, seed 3', 'search')
    """
    key, seed = name
    return ", ".join([*key, *([] if seed is None else [f"seed {seed}"])])


def clocked(seconds: float) -> str:
    """Seconds for people.

    >>> clocked(0.25), clocked(75), clocked(7260)
    ('0.2 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 60:
        if seconds < 10:
            return f"{seconds:.1f} s"
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


_MOST = 10_000  # more are a slip of the pen
_LARGEST = 2**63 - 1  # that torch takes
_REMEDY = "Write 0-9 or 0,3,5"


def seed_range(text: str) -> list[int]:
    """The seeds of a line.

    >>> seed_range("0-3"), seed_range("1,4,7-8")
    ([0, 1, 2, 3], [1, 4, 7, 8])
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = part.split("-")
        if len(ends) > 2 or not all(end.strip().isdecimal() for end in ends):
            raise _refusal(text, f"{part!r} is no range")
        first = int(ends[0])
        last = int(ends[-1])
        if last > _LARGEST:
            raise _refusal(text, f"{last} is larger than {_LARGEST}")
        if last < first:
            raise _refusal(text, f"{part!r} ends before it begins")
        if last - first + len(seeds) >= _MOST:
            raise _refusal(text, f"there are more than {_MOST:,}")
        seeds += range(first, last + 1)
    return seeds


def ranges(seeds: Sequence[int]) -> str:
    """Seeds as people write them.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    out: list[list[int]] = []
    for seed in sorted(seeds):
        if out and seed == out[-1][-1] + 1:
            out[-1][1:] = [seed]
        else:
            out.append([seed])
    return ",".join("-".join(map(str, ends)) for ends in out)


def _refusal(text: str, why: str) -> PullbackError:
    return PullbackError(f"The seeds {text!r} cannot be read", why, _REMEDY)
