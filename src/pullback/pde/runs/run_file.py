"""The checkpoint of a run: one process reads and writes it for all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from ..._core.processes import Processes
from ..checkpoint import FORMAT, load_state


class RunFile:
    """Where the state of a run is saved, at most once a minute and at the end.

    Args:
        path: of the file; None saves nothing.
        identity: what must be the same for a run to go on from the file.
        processes: those that solve together.
    """

    #: seconds of steps between two savings: at most this much work is lost
    seconds_between: ClassVar[float] = 60.0

    def __init__(self, path: Path | None, identity: dict[str, Any], processes: Processes) -> None:
        self.path = path
        self._identity = identity
        self._processes = processes
        self._next_saving = 0.0

    def start_clock(self, seconds_spent: float) -> None:
        """Let the minute until the next saving begin at these seconds."""
        self._next_saving = seconds_spent + self.seconds_between

    def is_due(self, seconds_spent: float) -> bool:
        """Return True if there is a file, and the last saving was long ago."""
        return self.path is not None and seconds_spent >= self._next_saving

    def save(self, take_state: Callable[[], dict[str, Any]], *, collectively: bool = True) -> None:
        """Write the state; collectively, all processes fail where the first one does."""
        if self.path is None:
            return
        if collectively:
            barrier = self._processes.raise_together()
        else:
            barrier = nullcontext()
        with barrier:
            if self._processes.rank == 0:
                FORMAT.write(self.path, {"run": self._identity, **take_state()})

    def load(self) -> dict[str, Any] | None:
        """Return the state that was saved, on all processes; None if there is none."""
        if self.path is None:
            return None
        state = None
        with self._processes.raise_together():
            if self._processes.rank == 0 and self.path.exists():
                state = load_state(self.path, self._identity)
        return self._processes.broadcast_object(state)
