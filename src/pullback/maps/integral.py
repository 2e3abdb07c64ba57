r"""An integral of a differential expression: (params) ↦ √w (Σᵢ qᵢ f(xᵢ, u, ∂u, …) − v), one number.

Its Jacobian is one row, qᵀJ of the integrand: the reverse pass of a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .base import Linearization, Map, Pulled
from .operator import OperatorMap


class IntegralMap(Map):
    """z = √w (∫f − v): (1, R).

    Args:
        integrand: f at the quadrature's points, (N, R), unweighted.
        quadrature: q, (N,).
        value: v, what the integral should be.
        weight: w, of the square in the loss.
    """

    def __init__(
        self, integrand: OperatorMap, quadrature: Tensor, value: float, weight: float
    ) -> None:
        self.integrand, self._value = integrand, value
        self._root = weight**0.5
        self._q = self._root * quadrature

    @property
    def nested_because(self) -> str:
        """Why the derivatives are nested instead of carried forward, or empty."""
        return self.integrand.nested_because

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """z: (1, R)."""
        return self.total(self.integrand(params)) - self._root * self._value

    def total(self, f: Tensor) -> Tensor:
        """√w Σ qᵢ fᵢ: (N, R) -> (1, R)."""
        return (self._q @ f)[None]

    def spread(self, u: Tensor) -> Tensor:
        """The transpose: (1, R) -> (N, R)."""
        return self._q[:, None] * u

    def linearize(self, params: Mapping[str, Tensor]) -> IntegralLinearization:
        return IntegralLinearization(self, params)


class IntegralLinearization(Linearization):
    """qᵀJ, where J is the integrand's."""

    def __init__(self, source: IntegralMap, params: Mapping[str, Tensor]) -> None:
        self._map, self._inner = source, source.integrand.linearize(params)
        self.space, self.structured = self._inner.space, self._inner.structured
        self.footprint = self._inner.footprint
        self.value = source.total(self._inner.value) - source._root * source._value

    def jvp(self, v: Tensor) -> Tensor:
        return self._map.total(self._inner.jvp(v))

    def vjp(self, u: Tensor) -> Tensor:
        return self._inner.vjp(self._map.spread(u))

    def pullback(self, covectors: Tensor) -> Pulled:
        matrix = torch.stack([self.vjp(u.reshape(self.value.shape)) for u in covectors])
        return Pulled.of_rows(self.space, (1, len(covectors)), matrix)
