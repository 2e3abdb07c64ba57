"""A module lent to the flow: moved to a point for one evaluation, and put back to its own bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .._core.capture import plain
from .._core.errors import PullbackError
from .._core.space import ParameterSpace
from .._core.state import Snapshot


class Host:
    """The parameters of a module that require gradients, as one flat vector in float64."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise PullbackError(
                "The flow needs the model itself",
                f"got {type(model).__name__}",
                "Pass an nn.Module, or a function φ with start= and a loss on its values",
            )
        self.model = plain(model)
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.space = ParameterSpace(self.params)
        low = sorted({str(p.dtype) for p in self.params.values() if p.dtype != torch.float64})
        if low:
            raise PullbackError(
                "A flow needs float64",
                f"some parameters are {', '.join(low)}, whose round-off is far above what the "
                "integrator's error control works with",
                "Call .double() on the model and its data",
            )

    def now(self) -> Tensor:
        """The parameters as they are, flat."""
        return self.space.flatten({n: p.detach() for n, p in self.params.items()}).clone()

    @contextmanager
    def at(self, flat: Tensor) -> Iterator[None]:
        """The module at a point, without gradients; parameters, gradients, buffers come back."""
        saved = [(p, p.detach().clone(), p.grad) for p in self.params.values()]
        before = Snapshot(self.model, self.space.device)
        try:
            self.write(flat)
            self.clear()
            yield
        finally:
            for p, value, gradient in saved:
                p.data.copy_(value)
                p.grad = gradient
            before.restore()

    def write(self, flat: Tensor) -> None:
        """Put a flat vector into the parameters."""
        for name, value in self.space.split(flat.to(self.space.device)).items():
            self.params[name].data.copy_(value)

    def clear(self) -> None:
        """Forget the gradients."""
        for p in self.params.values():
            p.grad = None

    def gradient(self) -> Tensor:
        """p.grad, flat; a copy."""
        return self.space.flatten({n: p.grad for n, p in self.params.items()}).clone()
