"""The network together with the unknown coefficients: all that is solved for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Trial(nn.Module):
    """The network with the unknown coefficients beside it: all that is solved for."""

    def __init__(self, network: nn.Module, unknowns: Mapping[str, float], like: Tensor) -> None:
        super().__init__()
        self.network = network
        self.unknowns = nn.ParameterDict(
            {name: nn.Parameter(like.new_tensor(float(v))) for name, v in unknowns.items()}
        )
        named = dict(self.named_parameters())
        names = {id(p): name for name, p in named.items()}
        self._slots: list[tuple[dict[str, Any], str, str]] = [
            (module._parameters, key, names[id(p)])
            for module in self.modules()  # each once, wherever it is used
            for key, p in module._parameters.items()
            if p is not None
        ]

    def forward(self, x: Any) -> Any:
        return self.network(x)

    def apply_to(self, params: dict[str, Tensor], x: Any) -> Any:
        """u(x) with these parameters, in every place that holds them.

        As `torch.func.functional_call`, whose search for the places by name takes longer than a
        small network.
        """
        own = [held[key] for held, key, _ in self._slots]
        try:
            for held, key, name in self._slots:
                held[key] = params.get(name, held[key])
            return self.network(x)
        finally:
            for (held, key, _), p in zip(self._slots, own, strict=True):
                held[key] = p


def select_unknowns(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The unknowns among a trial's parameters."""
    start = "unknowns."
    return {n.removeprefix(start): p for n, p in params.items() if n.startswith(start)}
