"""Interruptions of a run: one process saves before it ends, several of them stop together."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
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
def held_back() -> Iterator[Interruption]:
    """Note Ctrl-C and SIGTERM inside, where steps are in flight that other processes take part in.

    Only the main thread can; elsewhere signals act as ever.
    """
    came = Interruption()

    def note(number: int, frame: object) -> None:
        came.number = number

    with _handled(_HEARD, note):
        yield came


@contextmanager
def terminable(enabled: bool) -> Iterator[Interruption]:
    """Let SIGTERM end the process as an exception does, so that the run is saved first.

    A handler of somebody else stays.
    """
    came = Interruption()

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with _handled([signal.SIGTERM] if enabled and usual else [], leave):
        yield came


@contextmanager
def _handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, object], None]
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
