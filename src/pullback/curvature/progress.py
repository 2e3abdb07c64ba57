"""A line on the terminal that says how far a pass over the data is."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Seconds between two lines."""

    terminal: float = 0.2  # a line that is overwritten; more often cannot be read
    file: float = 10.0  # a line of its own in a log


class ProgressLine:
    """One pass over batches, written to stderr.

    Args:
        title: what is done.
        total: how many batches there are, None where the loader does not say.
        is_shown: True, False, or None for terminals alone.
    """

    def __init__(self, title: str, total: int | None, is_shown: bool | None) -> None:
        self._title = title
        self._total = total
        self._is_terminal = sys.stderr.isatty()
        self._is_shown = self._is_terminal if is_shown is None else is_shown
        self._start = time.monotonic()
        self._written = 0.0

    def update(self, batches: int, samples: int) -> None:
        """Say how many batches and samples are done, if it is time."""
        moment = time.monotonic()
        interval = Interval.file
        if self._is_terminal:
            interval = Interval.terminal
        if self._is_shown and moment - self._written >= interval:
            self._written = moment
            self._write(batches, samples, moment - self._start)

    def close(self, batches: int, samples: int) -> None:
        """Write the last line."""
        if self._is_shown:
            self._write(batches, samples, time.monotonic() - self._start)
            if self._is_terminal:
                sys.stderr.write("\n")

    def _write(self, batches: int, samples: int, seconds: float) -> None:
        share = f"{batches}"
        if self._total:
            share = f"{batches}/{self._total}"
        line = f"{self._title}: batch {share}, {samples} samples, {seconds:.1f} s"
        if self._is_terminal:
            sys.stderr.write(f"\r{line}\x1b[K")
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
