"""Networks on a window of time that begin with a given state, in units of their fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .modules import mlp


class StateLift(nn.Module):
    """u = c₀ + c₁τ + … + cₖ₋₁τᵏ⁻¹ + τᵏ N(2τ − 1), τ = (t − start)/length, for each field.

    The state at the start, u and its derivatives below the k-th, holds whatever N is.

    Args:
        network: N, of one input.
        start, length: of the window.
        coefficients: c of each field, as many as its equation has order.
    """

    def __init__(
        self,
        network: nn.Module,
        start: float,
        length: float,
        coefficients: Sequence[Sequence[float]],
    ) -> None:
        super().__init__()
        self.network = network
        self.start = start
        self.length = length
        self.coefficients = [list(of_field) for of_field in coefficients]

    def forward(self, x: Any) -> Any:
        tau = (x - self.start) * (1 / self.length)
        outputs = self.network(2 * tau - 1)
        columns = []
        for field, coefficients in enumerate(self.coefficients):
            column = outputs[:, field : field + 1]
            for coefficient in reversed(coefficients):
                column = column * tau + coefficient
            columns.append(column)
        return torch.cat(columns, -1)

    def get_extra_state(self) -> dict[str, Any]:
        """Return what the state dictionary has beside the parameters of N."""
        names = ("start", "length", "coefficients")
        return {name: getattr(self, name) for name in names}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what `get_extra_state` returned."""
        for name, value in state.items():
            setattr(self, name, value)


class InUnits(nn.Module):
    """Fields of a network times their units, (m,)."""

    units: Tensor

    def __init__(self, network: nn.Module, units: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("units", units.to(next(network.parameters())))

    def forward(self, x: Any) -> Any:
        return self.network(x) * self.units


def copy_architecture(state: dict[str, Any], number: int) -> nn.Module | None:
    """Return a network for the parameters of a window in a saved solution.

    Args:
        state: the state dictionary of `Slabs`.
        number: of the slab.

    Returns:
        None if the slab has another kind of network.
    """
    prefix = f"networks.{number}."
    units = state.get(f"{prefix}units")
    if units is None:
        return None
    hidden = state[f"{prefix}network.network.0.weight"]
    network = mlp(1, len(hidden), len(units), seed=0, dtype=hidden.dtype)
    return InUnits(StateLift(network, 0.0, 1.0, []), units)
