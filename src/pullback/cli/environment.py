"""Where a result came from: versions, device, threads, commit; and whether a device works."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

import pullback

from .._core.errors import PullbackError


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """What a reader needs to judge times and to repeat a run."""
    kind = torch.device(device)
    cuda = kind.type == "cuda" and torch.cuda.is_available()
    return {
        "pullback": pullback.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(kind) if cuda else str(kind),
        "threads": torch.get_num_threads(),
    }


def usable(device: str | torch.device) -> torch.device:
    """The device, or a refusal."""
    try:
        torch.zeros(1, device=device).item()  # meta has tensors and no values
    except (RuntimeError, AssertionError, ImportError) as error:
        # a backend that this torch lacks: no module, or a page on operators
        why = str(error).partition("\n")[0].partition(". This could be")[0].rstrip(".")
        raise PullbackError(
            f"The device {str(device)!r} cannot be used", why, "Use --device cpu"
        ) from None
    return torch.device(device)


def commit() -> str | None:
    """The commit of this source, "-dirty" where it was changed since; None outside of git."""
    source = Path(pullback.__file__)
    # an installed copy may lie inside somebody else's repository
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    return _git(source.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
