"""Saving a minimization so that it goes on to the same bits."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .._core.errors import PullbackError

#: the format of the files; others are refused
_VERSION = 1


def save(path: Path, state: dict[str, Any]) -> None:
    """Write all or nothing."""
    partial_path = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"vmc_version": _VERSION, **state}, partial_path)
        os.replace(partial_path, path)
    except (OSError, RuntimeError) as error:  # torch raises the latter for a full disk
        with suppress(OSError):
            partial_path.unlink(missing_ok=True)
        raise PullbackError(
            f"{path} could not be written",
            str(error).splitlines()[0],
            "Free some space or use another path; a checkpoint that was there before is intact",
        ) from error


def load(path: Path) -> dict[str, Any]:
    """Read a file that `save` wrote."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise PullbackError(
            f"{path} cannot be read", f"{error!r:.300}", "Delete it, or pass another path"
        ) from error
    if not isinstance(state, dict) or state.get("vmc_version") != _VERSION:
        raise PullbackError(
            f"{path} is not a saved minimization",
            "it lacks this version's mark",
            "Pass another path",
        )
    return state


def refuse_other_run(path: Path, saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise if a checkpoint belongs to another problem or network."""
    for name, value in identity.items():
        if saved.get(name) != value:
            raise PullbackError(
                f"{path} belongs to another run",
                f"its {name} is {saved.get(name)!r}, this run's {value!r}",
                "Pass another checkpoint, or delete this one",
            )
