"""Whether torch can use a device here."""

from __future__ import annotations

import torch

from ..._core.errors import PullbackError


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
