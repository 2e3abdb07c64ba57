"""Where a fit stands, and files from which an interrupted one goes on."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .._core.errors import PullbackError
from .fitted import DataTotals
from .passes import DataPass


@dataclass(frozen=True)
class CheckpointLimits:
    """How often a checkpoint is written."""

    #: seconds between two files: writing one takes a few at most
    seconds: float = 60.0


CHECKPOINT_LIMITS = CheckpointLimits()


@dataclass
class PassState:
    """Where a pass stands.

    Attributes:
        batches: how many were added.
        totals: over these batches; of all processes once the pass is complete.
        is_complete: whether all batches of all processes were added.
    """

    batches: int = 0
    totals: DataTotals = field(default_factory=DataTotals)
    is_complete: bool = False


class Checkpoint:
    """The state of each pass in a file of its own.

    Args:
        path: beginning of the files' names, None for no checkpoints.
        key: what the sums depend on; a file of another key is refused.
    """

    def __init__(self, path: Path | None, key: str) -> None:
        self._path = path
        self._key = key
        self._written = time.monotonic()
        self._files: list[Path] = []

    def restore(self, data_pass: DataPass) -> PassState:
        """Put a pass back to where its file says, and return how far that is."""
        path = self._register_file(data_pass)
        if path is None or not path.exists():
            return PassState()
        saved = torch.load(path, weights_only=True)
        if saved["key"] != self._key:
            raise PullbackError(
                "The checkpoint is of another fit",
                f"{path} was written for another model, structure or seed",
                "Delete the file, or give checkpoint= another name",
            )
        data_pass.restore(saved["sums"])
        return PassState(saved["batches"], DataTotals(**saved["totals"]), saved["is_complete"])

    def write(self, data_pass: DataPass, state: PassState) -> None:
        """Write the state if the pass is complete or the last time is long ago."""
        path = self._register_file(data_pass)
        is_recent = time.monotonic() - self._written < CHECKPOINT_LIMITS.seconds
        if path is None or (is_recent and not state.is_complete):
            return
        saved = {
            "key": self._key,
            "batches": state.batches,
            "totals": asdict(state.totals),
            "is_complete": state.is_complete,
            "sums": data_pass.state(),
        }
        temporary = path.with_name(f"{path.name}.part")
        torch.save(saved, temporary)
        temporary.replace(path)
        self._written = time.monotonic()

    def remove(self) -> None:
        """Delete the files of a fit that is complete."""
        for path in self._files:
            path.unlink(missing_ok=True)

    def _register_file(self, data_pass: DataPass) -> Path | None:
        if self._path is None:
            return None
        path = self._path.with_name(f"{self._path.name}.{data_pass.title}")
        self._files.append(path)
        return path
