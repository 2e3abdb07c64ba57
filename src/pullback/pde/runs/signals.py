"""Interruptions of a run: one process saves before it ends, several of them stop together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Interruption:
    """Which signal has come, 0 before one has."""

    number: int = 0

    def end(self) -> NoReturn:
        """End this process as the signal would have, which may have come to another one."""
        if self.number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.number)

    def repeat(self) -> None:
        """Let a signal act that came too late to be shared."""
        if self.number:
            signal.raise_signal(self.number)


@contextmanager
def interruptible(alone: bool, saved: bool) -> Iterator[Interruption]:
    """Let a run end in order at a signal.

    One process that saves its run ends at SIGTERM as at an exception, unless somebody else handles
    it. Several note Ctrl-C and SIGTERM, and stop after a step that all take part in. Only the main
    thread can; elsewhere signals act as ever.
    """
    came = Interruption()

    def note(number: int, frame: object) -> None:
        came.number = number

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    numbers = [signal.SIGINT, signal.SIGTERM]
    if alone:
        numbers = [signal.SIGTERM] if saved and usual else []
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    before = {number: signal.signal(number, leave if alone else note) for number in numbers}
    try:
        yield came
    finally:
        for number, old in before.items():
            signal.signal(number, old)
