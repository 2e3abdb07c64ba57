"""Files that are complete or absent: each is written under another name, then renamed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from .._core.errors import PullbackError


def write(path: Path, fill: Callable[[IO[bytes]], object]) -> Path:
    """Write a file by `fill`; an existing one stays until the new one is complete."""
    draft = path.with_name(f"{path.name}.draft-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise PullbackError(
            f"{path} could not be written",
            error.strerror or str(error),
            "Free some space or use another folder (--out); what was finished before is intact, "
            "and the same command goes on from there",
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    return path


def write_text(path: Path, text: str) -> Path:
    """Write text to a file; an existing one stays until the new one is complete."""
    return write(path, lambda file: file.write(text.encode()))


def make_folder(out: Path) -> Path:
    """Make the folder and return it; raise if nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(f"nothing can be written to {out}")
    except OSError as error:
        raise PullbackError(
            f"{out} cannot be the folder of the results", str(error), "Pass another --out"
        ) from None
    return out
