"""Answers of the device that are asked for as late as possible."""

from __future__ import annotations

import torch
from torch import Tensor


class Later:
    """Flags (n,) on their way to the host, which is not made to wait for them yet."""

    def __init__(self, flags: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._flags = flags
        if flags.is_cuda:
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(flags.device))

    def __call__(self) -> list[bool]:
        """The flags, as soon as the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        return self._flags.tolist()
