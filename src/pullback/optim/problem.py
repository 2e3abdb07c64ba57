"""A loss and its local picture, however it is stated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import Status
from .._core.processes import Processes
from .._core.space import ParameterSpace
from ..grams import Part
from ..metrics import Metric

Place = Callable[[Mapping[str, Tensor], Tensor], Mapping[str, Tensor]]


class StepProblem(ABC):
    """L and its local picture at the current parameters.

    On several processes L, its gradient and Jᵀ∂L/∂z are those of all of them; parts and r are this
    process's own, and its parts may be none.
    """

    #: whether the rows were checked against autograd elsewhere
    proven: bool = False

    #: whose layers the rows may refer to
    model: nn.Module | None = None

    def __init__(self, params: dict[str, nn.Parameter], processes: Processes | None = None) -> None:
        self.params = params
        self.processes = Processes() if processes is None else processes
        self.space = ParameterSpace(params)
        self.loss = float("nan")
        self.gradient = self.space.zeros(0)
        #: NOT_REPRESENTABLE where r was asked for and does not exist
        self.whitening = Status.OK

    @abstractmethod
    def evaluate(self) -> str:
        """Fill `loss` and `gradient`; a non-empty answer says why the step must be rejected."""

    @abstractmethod
    def parts(self, metric: Metric, batch: Any) -> tuple[list[Part], Tensor | None]:
        """The rows of A, and r where it is representable."""

    @abstractmethod
    def pulled(self) -> Tensor:
        """Jᵀ∂L/∂z: the gradient of what went through the recorded outputs."""

    @abstractmethod
    def losses(self, moves: Tensor, place: Place) -> Tensor:
        """L at place(w, move) for each row of moves, everything restored afterwards."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo what evaluating the loss disturbed."""

    def summed(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors, added up over all processes."""
        return self.processes.sum(tensors, "gradients")

    def broken(self) -> str:
        """Why neither loss nor gradient can be used, or nothing."""
        if not math.isfinite(self.loss):
            return f"the loss is not finite ({self.loss})"
        if not bool(torch.isfinite(self.gradient).all()):
            return "the gradient is not finite"
        return ""
