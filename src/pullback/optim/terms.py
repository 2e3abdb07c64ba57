"""Terms of a loss that is stated on derivatives of a network: squares of residuals, energies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import grad, jvp

from .._core.errors import PullbackError
from .._core.factor import Blocks, Diagonal, Factor
from ..maps import IntegralMap, ObjectiveMap, OperatorMap


class Term(ABC):
    """ℓ(z) for the values z of a map, with the metric that goes with it."""

    def __init__(self, map: ObjectiveMap | OperatorMap | IntegralMap) -> None:
        self.map = map

    @abstractmethod
    def loss(self, z: Tensor) -> Tensor:
        """ℓ(z), a scalar."""

    @abstractmethod
    def slope(self, z: Tensor) -> Tensor:
        """∂ℓ/∂z."""

    @abstractmethod
    def factor(self, z: Tensor) -> Factor:
        """S with S Sᵀ the metric at z."""

    #: whether S r = ∂ℓ/∂z is solved by r = z
    whitened: bool = False


class Squares(Term):
    """½‖z‖², in the Euclidean metric of z: Gauss–Newton."""

    whitened = True

    def loss(self, z: Tensor) -> Tensor:
        return 0.5 * z.square().sum()

    def slope(self, z: Tensor) -> Tensor:
        return z

    def factor(self, z: Tensor) -> Factor:
        return Diagonal(torch.ones_like(z))


class EnergyTerm(Term):
    """Σ_i q_i e_i(z_i), in the metric q_i ∇²e_i(z_i) of the energy's own second variation.

    Args:
        map: its values z (N, C) are what the density depends on.
        density: z ↦ e (N,), entry i of z_i alone, convex in it.
        weights: q, (N,).
    """

    def __init__(
        self, map: ObjectiveMap | OperatorMap, density: Callable[[Tensor], Tensor], weights: Tensor
    ) -> None:
        super().__init__(map)
        self._density, self._weights = density, weights

    def loss(self, z: Tensor) -> Tensor:
        return (self._weights * self._density(z)).sum()

    def slope(self, z: Tensor) -> Tensor:
        return grad(self.loss)(z)

    def factor(self, z: Tensor) -> Factor:
        size = z.shape[1]
        eye = torch.eye(size, dtype=z.dtype, device=z.device)
        columns = [jvp(grad(self.loss), (z,), (e.expand_as(z),))[1] for e in eye]
        return Blocks.of_metric(torch.stack(columns, -1), (size,))


class Objective:
    """A loss Σ_k ℓ_k(φ_k(w)) as terms whose maps know their own structure.

    On several processes the loss is the sum of their objectives'.

    Args:
        terms: ℓ_k with φ_k.
        shared: whether other processes have terms too, so that here may be none.
    """

    def __init__(self, terms: Sequence[Term], *, shared: bool = False) -> None:
        self.terms = tuple(terms)
        if not self.terms and not shared:
            raise PullbackError("The objective has no terms", "there is no loss", "Pass some")

    def loss(self, params: Mapping[str, Tensor]) -> Tensor:
        """L, a scalar."""
        first, *others = (term.loss(term.map(params)) for term in self.terms)
        return sum(others, first)
