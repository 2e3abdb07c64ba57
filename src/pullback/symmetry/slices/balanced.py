"""The slice orthogonal to orbits, for units or for whole layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .balance import balance
from .energies import Energies
from .orbit_gram import OrbitGram
from .slice import Slice


class Balanced(Slice):
    r"""Every unit takes in what it gives out: Σ_in w² (with its bias) = Σ_out w².

    The least Σw² of the orbit, and the slice orthogonal to orbits: constraints have the generators
    as gradients. The gradient of any function of the network's outputs is tangent to it, biases or
    not, and so is uniform weight decay. With `Scaling.merged` it is the balanced slice of layers,
    |A_{k+1}|² = |A_k|² + |b_k|².
    """

    def log_scales(self, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return balance(self.units, params)

    def constraint(self, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """½ log(in/out) of every unit, 0 for dead ones: (U,)."""
        energies = Energies(self.units, self.params if params is None else params)
        return -0.5 * energies.imbalance(energies.zeros())

    def _normal(self, v: Mapping[str, Tensor]) -> Tensor:
        return self.units.pair(self.params, v)

    def _conormal(self, a: Tensor) -> dict[str, Tensor]:
        return self.units.spread(self.params, a)

    def _solve(self, rhs: Tensor, orbits: bool) -> Tensor:
        energies = Energies(self.units, self.params)
        gram = OrbitGram(energies, energies.zeros())
        return gram.solve(rhs) * (-gram.top).exp() / energies.unit / energies.unit
