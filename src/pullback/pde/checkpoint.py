"""Files that runs and solutions are saved to."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._core.errors import PullbackError

#: of the file format
_VERSION = 5


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state to a file; if that fails, the file is as it was before."""
    draft = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"version": _VERSION, **state}, draft)
        os.replace(draft, path)
    except (OSError, RuntimeError) as error:  # torch's own of a full disk is the latter
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise PullbackError(
            f"{path} could not be written",
            str(error).splitlines()[0],
            "Free some space or use another path; a checkpoint that was there before is intact",
        ) from error


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


def load_state(path: Path, identity: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of a file; raise if it belongs to another run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise PullbackError(
            f"{path} cannot be read", f"{error!r:.300}", "Delete it, or pass another path"
        ) from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise PullbackError(
            f"{path} is not a saved solve", "it lacks this version's mark", "Pass another path"
        )
    for name, value in (identity or {}).items():
        if state["run"].get(name) != value:
            raise PullbackError(
                f"{path} belongs to another run",
                f"its {name} is {state['run'].get(name)!r}, this run's {value!r}",
                "Pass another checkpoint, or delete this one",
            )
    return state
