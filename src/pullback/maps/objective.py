"""A function of the parameter dict that returns named, weighted residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .base import Map
from .function import FunctionLinearization


@dataclass(frozen=True)
class Residual:
    """One named residual: values (N, ...) and a weight, a number or one per sample."""

    value: Tensor
    weight: Tensor | float = 1.0


Objective = Callable[[dict[str, Tensor]], Any]


def residuals(output: Any, *, shared: bool = False) -> dict[str, Residual]:
    """The objective's return value in one form: tensor, (tensor, weight), Residual, or a dict.

    Where it is `shared` with other processes, residuals may be empty here.
    """
    if not isinstance(output, Mapping):
        output = {"residual": output}
    named = {}
    for name, item in output.items():
        if isinstance(item, tuple):
            item = Residual(*item)
        elif isinstance(item, Tensor):
            item = Residual(item)
        if not isinstance(item, Residual) or not isinstance(item.value, Tensor):
            raise PullbackError(
                f"The objective's entry {name!r} is not a residual",
                f"got {type(item).__name__}",
                "Return a tensor, a pair (tensor, weight), or a dict of these",
            )
        if item.value.is_complex():
            raise PullbackError(
                f"The residual {name!r} is complex",
                "its square is no loss",
                "Return real and imaginary parts (torch.view_as_real)",
            )
        named[name] = item
    if not shared and (not named or any(r.value.numel() == 0 for r in named.values())):
        raise PullbackError(
            "The objective has an empty residual",
            f"entries: { {n: tuple(r.value.shape) for n, r in named.items()} }",
            "Give every residual at least one point",
        )
    return named


class ObjectiveMap(Map):
    """w ↦ √(weight) · residual, all entries in one vector of shape (n, 1).

    With reduction "mean" each named residual is averaged over its samples (axis 0) and summed
    over the rest, so that the loss is ½‖z‖² = ½ Σ_k weight_k mean_i |r_ki|².

    Args:
        objective: returns the residuals.
        reduction: "mean" or "sum".
        totals: samples of each residual on all processes; by default those here are all.
        rows: whether there is any residual here.
    """

    def __init__(
        self,
        objective: Objective,
        reduction: str = "mean",
        totals: Mapping[str, int] | None = None,
        rows: int = 1,
    ) -> None:
        self.objective, self.reduction, self.totals, self.rows = objective, reduction, totals, rows

    def samples(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """How many samples each residual has on this process."""
        found = residuals(self.objective(dict(params)), shared=True)
        return {n: len(r.value) if r.value.ndim else 1 for n, r in found.items()}

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """z: (n, 1)."""
        pieces = []
        shared = self.totals is not None
        for name, residual in residuals(self.objective(dict(params)), shared=shared).items():
            value = residual.value
            value = (
                value.reshape(1, 1)
                if value.ndim == 0
                else value.flatten(1)
                if value.ndim > 1
                else value[:, None]
            )
            weight = torch.as_tensor(residual.weight, dtype=value.dtype, device=value.device)
            if weight.ndim > 0:
                if weight.numel() not in (1, value.shape[0]):
                    raise PullbackError(
                        f"The weight of residual {name!r} does not fit",
                        f"{weight.numel()} weights for {value.shape[0]} samples",
                        "Give one number, or one weight per sample",
                    )
                weight = weight.reshape(-1, 1)
            if self.reduction == "mean":
                weight = weight / (value.shape[0] if self.totals is None else self.totals[name])
            pieces.append((value * weight.sqrt()).flatten())
        return torch.cat(pieces)[:, None]

    def linearize(self, params: Mapping[str, Tensor]) -> FunctionLinearization:
        return FunctionLinearization(self, params)
