"""Something to train: data, a model, a loss, and what is measured of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from .contender import Contender


class Problem(ABC):
    """A training problem with fixed data and a fixed initial model.

    Attributes:
        title: its name in tables and figures.
        setting: model and data in a few words.
        seconds: the time that each contender gets.
        x, y: the training data, samples first.
        contenders: the optimizers that race on it.
    """

    title: str
    setting: str
    seconds: float
    x: Tensor
    y: Tensor
    contenders: tuple[Contender, ...]

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, the same for every contender."""

    @abstractmethod
    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        """The loss that is trained, of outputs z."""

    @abstractmethod
    def measure(self, model: nn.Module) -> dict[str, float]:
        """Numbers by name; the first is plotted and tuned for, and smaller is better."""
