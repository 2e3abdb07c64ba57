"""Residuals that call `torch.autograd` themselves, as a map that can be linearized."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.space import ParameterSpace
from ...maps.base import Linearization, Map, Pulled

#: gives the residuals (n,) of parameters by name, with a graph back to these
Residuals = Callable[[dict[str, Tensor]], Tensor]
#: entries of the covectors that are pulled back at once; with 2^22 a step takes twice as long
_CHUNK_ENTRIES = 2**16


class AutogradMap(Map):
    """z = f(w), where f differentiates its own network by `torch.autograd.grad`.

    `torch.func`, which other maps use, cannot see through such calls. Here J is found row by row in
    reverse mode, many rows at once.

    Args:
        residuals: f, from parameters by name to the weighted residuals (n,).
    """

    #: why derivatives are not carried forward
    nested_because = "the residuals call torch.autograd"

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return z."""
        with torch.enable_grad():
            return self._residuals(dict(params)).detach()

    def linearize(self, params: Mapping[str, Tensor]) -> AutogradLinearization:
        point = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            value = self._residuals(point)
        if not _is_usable(value):
            description = f"they are {type(value).__name__}"
            if isinstance(value, Tensor):
                description = (
                    f"they have shape {tuple(value.shape)}, a graph: {value.requires_grad}"
                )
            raise PullbackError(
                "The residuals are not usable",
                description,
                "Return a vector (n,), n ≥ 1, that depends on the given parameters",
            )
        return AutogradLinearization(value, point)


def _is_usable(value: object) -> bool:
    """Return True for a vector (n,), n ≥ 1, with a graph."""
    if not isinstance(value, Tensor):
        return False
    return value.requires_grad and value.ndim == 1 and len(value) > 0


class AutogradLinearization(Linearization):
    """z = f(w) and J, which is formed once."""

    structured = True  # a gradient costs no more once J is there

    def __init__(self, value: Tensor, point: dict[str, Tensor]) -> None:
        self.space = ParameterSpace(point)
        self.value = value.detach().to(self.space.dtype)
        self._rows = self._pull_rows(value, list(point.values()))

    def _pull_rows(self, value: Tensor, parameters: list[Tensor]) -> Tensor:
        """Return J, (n, p), by batches of covectors."""
        count = len(value)
        chunk = max(16, _CHUNK_ENTRIES // count)
        rows = []
        for start in range(0, count, chunk):
            size = min(chunk, count - start)
            covectors = torch.zeros(size, count, dtype=value.dtype, device=value.device)
            covectors[torch.arange(size), torch.arange(start, start + size)] = 1.0
            gradients = torch.autograd.grad(
                value,
                parameters,
                covectors,
                retain_graph=True,
                is_grads_batched=True,
                allow_unused=True,
            )
            columns = []
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is None:
                    gradient = parameter.new_zeros(size, *parameter.shape)
                columns.append(gradient.detach().reshape(size, -1))  # a number has no dimensions
            rows.append(torch.cat(columns, 1))
        return torch.cat(rows).to(self.space.dtype)

    def rows(self) -> Tensor:
        return self._rows

    def jvp(self, v: Tensor) -> Tensor:
        return self._rows @ v

    def vjp(self, u: Tensor) -> Tensor:
        return self._rows.T @ u

    def pullback(self, covectors: Tensor) -> Pulled:
        rows = covectors.flatten(1).T[:, :, None] * self._rows[:, None, :]
        shape = (covectors.shape[1], covectors.shape[0])
        return Pulled.of_rows(self.space, shape, rows.flatten(0, 1))
