"""Everything a trial evaluation may disturb, so that it can be put back to the same bits."""

from __future__ import annotations

import torch
from torch import nn


class RandomState:
    """The state of torch's random generators, on the CPU and on the device in use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def is_unchanged(self) -> bool:
        """Whether nothing has been drawn since."""
        now = RandomState(self.device)
        same = torch.equal(self._cpu, now._cpu)
        if self._cuda is None or now._cuda is None:
            return same
        return same and torch.equal(self._cuda, now._cuda)

    def restore(self) -> None:
        """Set the generators back to where they were."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)


class Snapshot:
    """A module's buffers (running statistics, counters) and the random state."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._random = RandomState(device)

    @torch.no_grad()
    def restore(self) -> None:
        """Put buffers and random state back."""
        for module, name, buffer, saved in self._buffers:
            buffer.copy_(saved)
            module._buffers[name] = buffer  # where a forward pass has put another one
        self._random.restore()
