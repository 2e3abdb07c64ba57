"""Memory for Σ δδᵀ of many layers, side by side: those of a size are then worked on at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ....maps.layers.moments import Sharing, stackable
from ....maps.record import Entry
from .aims import Aim


class Beside:
    """Places for the linear layers of one pass, in the layers' order.

    Args:
        entries: the uses of layers.
        aims: what each is measured for.
        sharing: how places enter.
    """

    def __init__(self, entries: Sequence[Entry], aims: Sequence[Aim], sharing: Sharing) -> None:
        counts: Counter[int] = Counter()
        self._at: dict[int, int] = {}
        for i, (entry, aim) in enumerate(zip(entries, aims, strict=True)):
            width = entry.shape[-1] if entry.shape else 0
            if aim.rows and aim.weights is not None and width <= sharing.longest:
                self._at[i] = counts[width]
                counts[width] += 1
        self._counts, self._memory = counts, {}

    def place(self, i: int, delta: Tensor) -> Tensor | None:
        """For the moments (1, n, n) of this use, None where they are formed elsewhere."""
        at, width = self._at.get(i), delta.shape[-1]
        if at is None or not stackable(delta):
            return None
        if width not in self._memory:
            shape = (self._counts[width], 1, width, width)
            self._memory[width] = delta.new_empty(shape, dtype=torch.float32)
        return self._memory[width][at]
