"""The closure of one step: its gradient is that of the energy, its values judge the step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError


class EnergyClosure:
    r"""A closure whose gradient is ∇⟨H⟩, and whose values judge a step in function space.

    The first call takes the gradient, by the cotangents c = 2(E − ⟨E⟩)/N on log ψ, and returns 0.
    A later call, at other parameters, takes none. With the change dz of log ψ since the first call
    it returns c·dz + |dz|²/(2 lr), the length taken in the Fubini–Study metric. If log ψ were
    linear in the parameters, the natural-gradient step lr·x would minimize it. A step rule that
    compares losses thereby notices a step that is too long for the network, from the same samples.

    Args:
        model: log ψ as real outputs, `LogAmplitude`.
        samples: of |ψ|², (N, sites).
        local_energies: E(s) of the samples, (N,), complex.
        rate: lr. Where it is zero, no step is judged.
    """

    def __init__(
        self, model: nn.Module, samples: Tensor, local_energies: Tensor, rate: float
    ) -> None:
        self._model = model
        first = next(iter(model.parameters()), torch.empty(0))
        self._inputs = samples.to(first.dtype)
        centered = local_energies - local_energies.mean()
        self._cotangents = torch.view_as_real(2 * centered / len(centered))
        self._rate = rate
        #: log ψ at the parameters of the first call, computed without gradients as later ones are:
        #: a network may use other operations where gradients are taken
        self._outputs_before: Tensor | None = None

    def __call__(self) -> float:
        if self._outputs_before is not None:
            return self._judge_move(self._outputs_before)
        self._model.zero_grad()
        outputs = self._model(self._inputs)
        if not outputs.requires_grad:
            raise PullbackError(
                "log ψ does not depend on the network's parameters",
                "its output has no gradient",
                "Use a network with parameters that require gradients",
            )
        weights = self._choose_cotangents(outputs)
        (outputs * weights.to(outputs.dtype)).sum().backward()
        with torch.no_grad():
            self._outputs_before = self._model(self._inputs)
        return 0.0

    def _choose_cotangents(self, outputs: Tensor) -> Tensor:
        """c in the shape of the outputs: without the imaginary part where ψ is positive."""
        if outputs.ndim == 2:
            return self._cotangents
        return self._cotangents[:, 0]

    def _judge_move(self, outputs_before: Tensor) -> float:
        """Return the slope of the energy along the move plus ‖move‖²/(2·rate), in log ψ."""
        if self._rate == 0:
            return 0.0
        with torch.no_grad():
            outputs = self._model(self._inputs)
        change = (outputs - outputs_before).double()
        if change.ndim == 2:  # phases count modulo 2π
            change[:, 1] = torch.remainder(change[:, 1] + math.pi, 2 * math.pi) - math.pi
        centered_change = change - change.mean(0)
        squared_length = centered_change.square().sum() / len(change)
        energy_change = (self._choose_cotangents(outputs) * change).sum()
        return float(energy_change + squared_length / (2 * self._rate))
