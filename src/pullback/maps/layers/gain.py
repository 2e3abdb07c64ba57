"""A parameter that multiplies, or is added to, what has its shape: gains written by hand."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .registry import register
from .scale import Scale


class Gain(nn.Module):
    """A use z = g ∘ x, or z = x + g, in the place of a module.

    `shape` is that with which g meets x, without leading ones.
    """

    def __init__(self, role: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.__dict__["_parameters"] = {"weight": None, "bias": None, role: parameter}
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, or add."""
        held: Any = self._parameters
        gain, shift = held["weight"], held["bias"]
        return x + shift.reshape(self.shape) if gain is None else x * gain.reshape(self.shape)


@register(Gain)
class ElementwiseGain(Scale):
    """x̂ is x; axes on which the gain has one entry share it."""

    def features(self, module: Any, ndim: int) -> int:
        return len(module.shape)

    def places(self, module: Any, ndim: int) -> list[int]:
        return [i - ndim for i, n in enumerate(module.shape) if n == 1]

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return x
