"""Files that runs are saved to: written as a whole, and read only by the format that wrote them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import PullbackError


@dataclass(frozen=True)
class CheckpointFormat:
    """The format of a kind of files.

    Attributes:
        title: what a file holds, for errors.
        key: under which a file has the number of its format.
        version: that number; files of others are refused.
    """

    title: str
    key: str
    version: int

    def write(self, path: Path, state: Mapping[str, Any]) -> None:
        """Write a state to a file; if that fails, the file is as it was before."""
        draft = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({self.key: self.version, **state}, draft)
            os.replace(draft, path)
        except (OSError, RuntimeError) as error:  # torch raises the latter for a full disk
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            raise PullbackError(
                f"{path} could not be written",
                str(error).splitlines()[0],
                "Free some space or use another path; a checkpoint that was there before is intact",
            ) from error

    def read(self, path: Path) -> dict[str, Any]:
        """Return the state of a file; raise if it has another format."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise PullbackError(
                f"{path} cannot be read", f"{error!r:.300}", "Delete it, or pass another path"
            ) from error
        if not isinstance(state, dict) or state.get(self.key) != self.version:
            raise PullbackError(
                f"{path} is not {self.title}", "it lacks this version's mark", "Pass another path"
            )
        return state


def refuse_other_run(path: Path, saved: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise if what identifies a run differs from what its checkpoint says."""
    for name, value in identity.items():
        if saved.get(name) != value:
            raise PullbackError(
                f"{path} belongs to another run",
                f"its {name} is {saved.get(name)!r}, this run's {value!r}",
                "Pass another checkpoint, or delete this one",
            )
