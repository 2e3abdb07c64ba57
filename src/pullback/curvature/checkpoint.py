"""Where a fit stands, and files from which an interrupted one goes on."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._core.errors import PullbackError
from .._core.processes import Processes
from .curvature import DataTotals
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
        processes: each has files of its own, and all go on from the same pass.
    """

    def __init__(self, path: str | Path | None, key: str, processes: Processes) -> None:
        with processes.raise_together("write its checkpoint"):
            self._path = _name_files(path, processes)
        self._key = key
        self._processes = processes
        self._written = time.monotonic()
        self._files: list[Path] = []

    def restore(self, data_pass: DataPass) -> PassState:
        """Load a pass from its file, and return how many batches it contains.

        The sums of a complete pass are those of all processes. Where another process was stopped
        before it wrote them too, this one starts the pass again.
        """
        with self._processes.raise_together("read its checkpoint"):
            saved = self._read(data_pass)
        is_complete = saved is not None and bool(saved["is_complete"])
        are_all_complete = bool(self._processes.all_agree(is_complete))
        if saved is None or (is_complete and not are_all_complete):
            return PassState()
        data_pass.restore(saved["sums"])
        return PassState(saved["batches"], DataTotals(**saved["totals"]), is_complete)

    def _read(self, data_pass: DataPass) -> dict[str, Any] | None:
        """Return what was written for a pass, None where there is no file."""
        path = self._register_file(data_pass)
        if path is None or not path.exists():
            return None
        try:
            saved = torch.load(path, weights_only=True)
        except Exception as error:  # torch raises many types for a file that is cut off
            raise PullbackError(
                "The checkpoint cannot be read",
                f"{path} is not a file of a fit, or not whole",
                "Delete the file, or give checkpoint= another name",
            ) from error
        if saved["key"] != self._key:
            raise PullbackError(
                "The checkpoint is of another fit",
                f"{path} was written for another model, structure, seed, choice of parameters or "
                "number of processes",
                "Delete the file, or give checkpoint= another name",
            )
        return saved

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


def _name_files(path: str | Path | None, processes: Processes) -> Path | None:
    """Return the beginning of the names of this process's files."""
    if path is None:
        return None
    path = Path(path)
    if not path.parent.is_dir():
        raise PullbackError(
            "The checkpoint cannot be written",
            f"there is no folder {path.parent}",
            "Make the folder first",
        )
    if processes.is_single:
        return path
    return path.with_name(f"{path.name}.{processes.rank}")


def refuse_fewer_batches(read: int, restored: int) -> None:
    """Raise if the loader had fewer batches than the checkpoint says were added."""
    if read < restored:
        raise PullbackError(
            "The checkpoint is of other data",
            f"it has {restored} batches, and the loader yielded {read}",
            "Give the loader of the interrupted fit, or delete the checkpoint's files",
        )
