"""Files that runs and solutions are saved to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from .._core.checkpoint_file import CheckpointFormat, refuse_other_run
from .._core.errors import PullbackError

FORMAT = CheckpointFormat("a saved solve", key="version", version=5)


def load_parameters(path: Path, module: nn.Module, state: dict[str, Any]) -> None:
    """Load parameters and buffers into a module; raise if it has another architecture."""
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise PullbackError(
            f"{path} belongs to another network",
            str(error).splitlines()[-1].strip(),
            "Use the same architecture, another path, or delete the file",
        ) from error


def load_state(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a file; raise if it belongs to another run."""
    state = FORMAT.read(path)
    refuse_other_run(path, state["run"], identity)
    return state
