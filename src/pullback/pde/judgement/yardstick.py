"""The error of a network where the solution is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem.problem import Problem

#: points at which a network is evaluated at once
_CHUNK = 20_000


class Yardstick:
    """Fixed quadrature points with the true values there, computed once."""

    def __init__(self, problem: Problem, template: Tensor, points: int = 10_000) -> None:
        self.problem = problem
        quadrature = problem.domain.quadrature(points)
        self._x = quadrature.x.to(template)
        self._weights = quadrature.weights.to(template.device)
        # the truth in float64: a float32 network is measured against the solution itself
        truth = problem.truth(quadrature.x).double()
        self._truth = self._center(truth.to(template.device))

    def _center(self, u: Tensor) -> Tensor:
        """Return u without the mean of fields that are known up to a constant."""
        mean = (self._weights[:, None] * u).sum(0) / self._weights.sum()
        is_free = [name in self.problem.free for name in self.problem.fields]
        return u - torch.where(torch.tensor(is_free, device=u.device), mean, 0.0)

    def errors(self, network: Callable[[Tensor], Any]) -> dict[str, float]:
        """Return ‖u − u*‖/‖u*‖ per field."""
        relative = self._norms(self._difference(network)) / self._norms(self._truth)
        return dict(zip(self.problem.fields, relative.tolist(), strict=True))

    def error(self, network: Callable[[Tensor], Any]) -> float:
        """Return ‖u − u*‖/‖u*‖ of all fields together."""
        difference = self._norms(self._difference(network)).norm()
        return float(difference / self._norms(self._truth).norm())

    @torch.no_grad()
    def _difference(self, network: Callable[[Tensor], Any]) -> Tensor:
        """Return u − u*, (N, m) in float64."""
        u = torch.cat([network(x) for x in self._x.split(_CHUNK)]).double()
        return self._center(u) - self._truth

    def _norms(self, u: Tensor) -> Tensor:
        """Return ‖u‖ per field, (m,)."""
        return (self._weights[:, None] * u.square()).sum(0).sqrt()
