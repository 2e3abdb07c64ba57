"""Natural gradient steps for a network and the unknown numbers of an inverse problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...optim import NaturalGradient, Objective, Squares
from ...solvers import PseudoInverse
from ...steps import TargetRatio
from .autograd_map import AutogradMap, Residuals

#: gives the residuals (n,) of parameters of a network by name, and of unknowns
Evaluate = Callable[[dict[str, Tensor], list[Tensor]], Tensor]
_NETWORK = "network."


class NetworkWithUnknowns(nn.Module):
    """One module of a network and of unknown tensors, which another package made.

    Args:
        network: keeps its parameters.
        unknowns: are copied; `write_back` gives them their new values.
    """

    def __init__(self, network: nn.Module, unknowns: Sequence[Tensor]) -> None:
        super().__init__()
        self.network = network
        self._originals = tuple(unknowns)
        parameter = next(network.parameters())
        self.unknowns = nn.ParameterList()
        for unknown in unknowns:
            copy = unknown.detach().to(parameter, copy=True)
            self.unknowns.append(nn.Parameter(copy))

    def bind(self, evaluate: Evaluate) -> Residuals:
        """Return residuals as a function of this module's parameters by name."""

        def residuals(params: dict[str, Tensor]) -> Tensor:
            network_params = {}
            for name, parameter in params.items():
                if name.startswith(_NETWORK):
                    network_params[name.removeprefix(_NETWORK)] = parameter
            unknowns = [params[f"unknowns.{i}"] for i in range(len(self.unknowns))]
            return evaluate(network_params, unknowns)

        return residuals

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the tensors of the other package the values that were found."""
        for original, unknown in zip(self._originals, self.unknowns, strict=True):
            original.detach_().copy_(unknown)
            original.requires_grad_()


def train(
    module: NetworkWithUnknowns, evaluate: Evaluate, steps: int, options: Mapping[str, Any]
) -> list[float]:
    """Take so many natural gradient steps; return the loss before each of them."""
    objective = Objective([Squares(AutogradMap(module.bind(evaluate)))])  # pyright: ignore[reportArgumentType]
    stages = {"solver": PseudoInverse(), "step": TargetRatio(), **options}
    optimizer = NaturalGradient(module, **stages)
    try:
        return [optimizer.step(objective=objective).loss for _ in range(steps)]
    finally:
        module.write_back()
