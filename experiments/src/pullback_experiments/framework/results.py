"""What the items of an experiment gave, for those who judge and draw."""

from __future__ import annotations

from collections.abc import Sequence

from .plain import Record
from .store import Store


class Results:
    """Records by item, over the seeds that are complete.

    Attributes:
        seeds: every item is done for each of them.
        quick: whether the short version ran.
    """

    def __init__(self, store: Store, seeds: Sequence[int], quick: bool) -> None:
        self.seeds, self.quick = tuple(seeds), quick
        self._store = store

    def of(self, *key: str) -> list[Record]:
        """The records of an item, in the order of the seeds it is done for."""
        return [self._store.record((key, s)) for s in self.seeds if (key, s) in self._store]

    def once(self, *key: str) -> Record:
        """The record of an item that is done once for all seeds."""
        return self._store.record((key, None))

    def took(self, *key: str) -> list[float]:
        """Seconds of an item, in the order of the seeds."""
        found = [self._store.took((key, seed)) for seed in self.seeds]
        return [t for t in found if t is not None]

    def has(self, *key: str, seed: int | None = None) -> bool:
        """Whether an item is done for this seed, or once for all."""
        return (key, seed) in self._store


class Available(Results):
    """Whatever is done, of complete and of other seeds: an item may have any number of records."""

    def __init__(self, store: Store, quick: bool) -> None:
        super().__init__(store, store.seeds(), quick)
