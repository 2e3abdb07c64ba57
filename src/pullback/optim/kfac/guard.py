"""Whether a step goes on, known at once or by a flag on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Guard:
    """Whether a step goes on: asked at once, or by a flag on the device that guards every change.

    Where it is deferred, the host does not wait: `is_void` is 1 where nothing may change.
    """

    is_deferred: bool
    #: the conditions so far, where they are deferred
    is_good: Tensor | None = None

    def holds(self, flag: Tensor) -> bool:
        """Ask for one more condition; False where it is known to fail."""
        if not self.is_deferred:
            return bool(flag)
        if self.is_good is None:
            self.is_good = flag
        else:
            self.is_good = self.is_good & flag
        return True

    @property
    def is_void(self) -> Tensor | None:
        """A float32 flag, or None where nothing is deferred."""
        if self.is_good is None:
            return None
        return (~self.is_good).float()
