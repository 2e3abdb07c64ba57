"""Kernels of our own, where Triton is at hand.

It comes with torch for CUDA, but needs a compiler besides: where it does not work, nothing is lost
but time.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch


@cache
def kernels(name: str, device: torch.device) -> Any:
    """A module of `kernels`, if what it has can be compiled for a device, else None."""
    if device.type != "cuda":
        return None
    try:
        found: Any = import_module(f".kernels.{name}", __package__)
        found.tried(device)
    except Exception:  # no Triton, no compiler, a GPU that it does not know: whatever it was
        return None
    return found
