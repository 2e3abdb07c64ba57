"""Interruptions that all processes of a run must hear of before any of them stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_HEARD = (signal.SIGINT, signal.SIGTERM)


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
def held_back(enabled: bool) -> Iterator[Interruption]:
    """Note Ctrl-C and SIGTERM inside, where steps are in flight that other processes take part in.

    Only the main thread can; elsewhere, and where it is not enabled, signals act as ever.
    """
    came = Interruption()
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield came
        return

    def note(number: int, frame: object) -> None:
        came.number = number

    before = {number: signal.signal(number, note) for number in _HEARD}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
