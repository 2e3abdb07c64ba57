"""Versions, device and threads of this process; and whether a device works."""

from __future__ import annotations

import platform
from typing import Any

import numpy
import scipy
import torch

import pullback

from .._core.errors import PullbackError


def describe_environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return what a reader needs to judge times and to repeat a run."""
    device = torch.device(device)
    device_name = str(device)
    if device.type == "cuda" and torch.cuda.is_available():
        device_name = torch.cuda.get_device_name(device)
    return {
        "pullback": pullback.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "platform": platform.platform(),
        "device": device_name,
        "threads": torch.get_num_threads(),
    }


def require_device(device: str | torch.device) -> torch.device:
    """Return the device; raise if it does not work here."""
    try:
        torch.zeros(1, device=device).item()  # meta has tensors and no values
    except (RuntimeError, AssertionError, ImportError) as error:
        # a backend that this torch lacks: no module, or a page on operators
        why = str(error).partition("\n")[0].partition(". This could be")[0].rstrip(".")
        raise PullbackError(
            f"The device {str(device)!r} cannot be used", why, "Use --device cpu"
        ) from None
    return torch.device(device)
