"""Interruptions of a run: one process saves before it ends, several of them stop together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Interruption:
    """The number of the signal that has come, 0 before one has."""

    number: int = 0

    def end(self) -> NoReturn:
        """End this process as the signal would have; another process may have received it."""
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.number)

    def repeat(self) -> None:
        """Send a signal again that came too late to be shared with the other processes."""
        if self.number:
            signal.raise_signal(self.number)


@contextmanager
def interruptible(*, is_single: bool, is_saved: bool) -> Iterator[Interruption]:
    """Context in which a signal ends a run in order.

    A single process that saves its run ends at SIGTERM as at an exception, unless somebody else
    handles it. Several processes note Ctrl-C and SIGTERM, and stop after a step that all take part
    in. Python handles signals in the main thread only; elsewhere they act as ever.
    """
    interruption = Interruption()

    def note(number: int, frame: object) -> None:
        interruption.number = number

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    handler = leave if is_single else note
    signals = _choose_signals(is_single=is_single, is_saved=is_saved)
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield interruption
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


def _choose_signals(*, is_single: bool, is_saved: bool) -> list[signal.Signals]:
    """Return the signals that a run handles itself."""
    if threading.current_thread() is not threading.main_thread():
        return []
    if not is_single:
        return [signal.SIGINT, signal.SIGTERM]
    is_unhandled = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_saved and is_unhandled:
        return [signal.SIGTERM]
    return []
