"""Copies of random state and buffers, with which a trial evaluation is undone to the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class RandomState:
    """The state of torch's random generators, on the CPU and on the device in use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cpu = torch.get_rng_state()
        self._cuda = None
        if device.type == "cuda":
            self._cuda = torch.cuda.get_rng_state(device)

    def is_unchanged(self) -> bool:
        """Return True if no random number has been drawn since."""
        current = RandomState(self.device)
        if not torch.equal(self._cpu, current._cpu):
            return False
        if self._cuda is None or current._cuda is None:
            return True
        return torch.equal(self._cuda, current._cuda)

    def restore(self) -> None:
        """Set the generators back to where they were."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self.device)


@dataclass(frozen=True)
class _SavedBuffer:
    """A buffer of a module, and a copy of its entries."""

    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor


class Snapshot:
    """A module's buffers (running statistics, counters) and the random state."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._buffers: list[_SavedBuffer] = []
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    copy = buffer.detach().clone()
                    self._buffers.append(_SavedBuffer(module, name, buffer, copy))
        self._random = RandomState(device)

    @torch.no_grad()
    def restore(self) -> None:
        """Put buffers and random state back."""
        for saved in self._buffers:
            saved.buffer.copy_(saved.copy)
            # a forward pass may have registered another tensor
            saved.module._buffers[saved.name] = saved.buffer
        self._random.restore()
