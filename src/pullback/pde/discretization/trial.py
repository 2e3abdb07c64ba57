"""The network together with the unknown coefficients: all that is solved for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

#: what the names of unknown coefficients begin with among the parameters of a trial
UNKNOWNS_PREFIX = "unknowns."


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """One place that holds a parameter; a shared parameter has several.

    Attributes:
        parameters: the dictionary of a module's own parameters.
        key: of the parameter there.
        name: of the parameter in the trial.
    """

    parameters: dict[str, Any]
    key: str
    name: str


class Trial(nn.Module):
    """The network with the unknown coefficients beside it."""

    def __init__(self, network: nn.Module, unknowns: Mapping[str, float], template: Tensor) -> None:
        super().__init__()
        self.network = network
        self.unknowns = nn.ParameterDict(
            {name: nn.Parameter(template.new_tensor(float(v))) for name, v in unknowns.items()}
        )
        self._slots = self._find_slots()

    def _find_slots(self) -> list[ParameterSlot]:
        """Return all places that hold parameters."""
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        slots = []
        for module in self.modules():  # each once, wherever it is used
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    slots.append(ParameterSlot(module._parameters, key, names[id(parameter)]))
        return slots

    def forward(self, x: Any) -> Any:
        return self.network(x)

    def apply_to(self, params: dict[str, Tensor], x: Any) -> Any:
        """Return u(x) with these parameters, in every place that holds them.

        As `torch.func.functional_call`, whose search for the places by name takes longer than a
        small network.
        """
        previous = [slot.parameters[slot.key] for slot in self._slots]
        try:
            for slot in self._slots:
                slot.parameters[slot.key] = params.get(slot.name, slot.parameters[slot.key])
            return self.network(x)
        finally:
            for slot, parameter in zip(self._slots, previous, strict=True):
                slot.parameters[slot.key] = parameter


def select_unknowns(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the unknown coefficients among the parameters of a trial, by their own names."""
    prefix = UNKNOWNS_PREFIX
    return {n.removeprefix(prefix): p for n, p in params.items() if n.startswith(prefix)}
