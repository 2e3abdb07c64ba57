"""How long what is left will take, from what took how long."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable

from .store import Key


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
        self._sum, self._count = 0.0, 0

    def know(self, key: Key, seconds: float | None) -> None:
        """An item that was done before."""
        if seconds is not None:
            self._known[key].append(seconds)
            self._sum, self._count = self._sum + seconds, self._count + 1

    def took(self, key: Key, seconds: float) -> None:
        """One of those that were missing is done."""
        self._missing[key] -= 1
        self.know(key, seconds)

    def of(self, key: Key) -> float:
        """Seconds that an item will take; 0 where nothing is known."""
        if key in self._known:
            return statistics.median(self._known[key])
        return self._sum / self._count if self._count else 0.0

    def left(self) -> float:
        """Seconds of all that is missing."""
        return sum(count * self.of(key) for key, count in self._missing.items() if count)
