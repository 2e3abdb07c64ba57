"""Small cotangents that wait for others like them: many products at once are fewer launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ....maps.layers import Layer
from ....maps.layers.moments import Sharing

if TYPE_CHECKING:
    from .sweep import Met

_MOST = 2**27  # bytes that wait
_LARGE = 2**26  # of one cotangent, beside which none does


class Waiting:
    """Cotangents of which Σ δδᵀ is yet to be formed.

    The last layers' are small and come first. Before the first layers' none is left to wait: those
    are the ones that take the memory.
    """

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._held: dict[Layer, list[tuple[Met, Tensor]]] = {}
        self._bytes = 0

    def add(self, layer: Layer, met: Met, delta: Tensor) -> None:
        """One more, for `met.outputs`."""
        self.make_room(delta)
        self._held.setdefault(layer, []).append((met, delta))
        self._bytes += delta.nbytes

    def make_room(self, delta: Tensor) -> None:
        """Form what waits, where it is too much beside this one."""
        if self._bytes and (self._bytes + delta.nbytes > _MOST or delta.nbytes > _LARGE):
            self.form()

    def form(self) -> None:
        """Nobody waits any longer."""
        for layer, some in self._held.items():
            found = layer.outputs_of([delta for _, delta in some], self._sharing)
            for (met, _), outputs in zip(some, found, strict=True):
                met.outputs = outputs
        self._held, self._bytes = {}, 0
