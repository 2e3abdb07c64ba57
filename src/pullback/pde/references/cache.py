"""Arrays that take seconds to compute, kept on disk between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from .base import Array

_memory: dict[str, dict[str, Array]] = {}  # what no disk would take


def folder() -> Path:
    """$PULLBACK_CACHE, or `pullback` in the platform's folder for caches."""
    if named := os.environ.get("PULLBACK_CACHE"):
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pullback"


def cached(
    name: str,
    parameters: Mapping[str, float],
    version: int,
    keys: tuple[str, ...],
    compute: Callable[[], dict[str, Array]],
) -> dict[str, Array]:
    """The arrays `keys` of compute(), from disk if they were computed before.

    The file is named after name, parameters and version. A file that cannot be read is computed
    again, and where nothing can be written the arrays stay in memory.
    """
    text = json.dumps([name, version, sorted(parameters.items())])
    path = folder() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    arrays = _memory.get(str(path)) or _read(path, keys)
    if arrays is None:
        arrays = compute()
        if not _write(path, arrays):
            _memory[str(path)] = arrays
    return arrays


def _read(path: Path, keys: tuple[str, ...]) -> dict[str, Array] | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in keys}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: Path, arrays: dict[str, Array]) -> bool:
    """Write beside the target and rename: a reader never meets half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return False
    return True
