"""Folders that several processes share: one of them at a time, and who is the last to leave.

Locks are the operating system's, on the folder itself: they leave no file, and end with the
process, however that ends. Where there are none (Windows, some network drives) nobody waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here, and keep others out."""
    with _opened(folder) as file:
        _locked(file, "wait")
        yield


@contextmanager
def inside(folder: Path) -> Iterator[Callable[[], bool]]:
    """While this process works in the folder beside others; a function: is it the last one?"""
    with _opened(folder) as file:
        _locked(file, "share")
        yield lambda: _locked(file, "try")


def _locked(file: int | None, how: Literal["wait", "share", "try"]) -> bool:
    """Whether the lock was not refused."""
    if file is None or sys.platform == "win32":
        return True
    import fcntl

    kind = {"wait": fcntl.LOCK_EX, "share": fcntl.LOCK_SH, "try": fcntl.LOCK_EX | fcntl.LOCK_NB}
    try:
        fcntl.flock(file, kind[how])
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextmanager
def _opened(folder: Path) -> Iterator[int | None]:
    try:
        file = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        file = None
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)
