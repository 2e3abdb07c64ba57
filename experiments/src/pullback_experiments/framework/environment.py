"""Where a result came from: what the library says of it, and the commit of its source."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch

import pullback
from pullback.cli import environment as library


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the versions and the machine that times depend on."""
    return {**library.describe_environment(device), "commit": commit()}


def commit() -> str | None:
    """Return the commit of the library's source, "-dirty" if changed; None outside of git."""
    source = Path(pullback.__file__)
    # an installed copy may lie inside somebody else's repository
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    return _git(source.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if process.returncode == 0:
        return process.stdout.strip()
    return None
