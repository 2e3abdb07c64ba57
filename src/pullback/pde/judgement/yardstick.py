"""The error of a network where the solution is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem.problem import Problem

_CHUNK = 20_000


class Yardstick:
    """Fixed quadrature points with the true values there, computed once."""

    def __init__(self, problem: Problem, like: Tensor, points: int = 10_000) -> None:
        self.problem = problem
        quadrature = problem.domain.quadrature(points)
        self._x = quadrature.x.to(like)
        self._weights = quadrature.weights.to(like.device)
        # the truth in float64: a float32 network is measured against the solution itself
        truth = problem.truth(quadrature.x).double()
        self._truth = self._centered(truth.to(like.device))

    def _centered(self, u: Tensor) -> Tensor:
        """Fields known up to a constant without their mean."""
        mean = (self._weights[:, None] * u).sum(0) / self._weights.sum()
        free = [name in self.problem.free for name in self.problem.fields]
        return u - torch.where(torch.tensor(free, device=u.device), mean, 0.0)

    def errors(self, network: Callable[[Tensor], Any]) -> dict[str, float]:
        """‖u − u*‖/‖u*‖ per field."""
        off, size = self._norms(network)
        return dict(zip(self.problem.fields, (off / size).tolist(), strict=True))

    def error(self, network: Callable[[Tensor], Any]) -> float:
        """‖u − u*‖/‖u*‖ of all fields together."""
        off, size = self._norms(network)
        return float(off.norm() / size.norm())

    @torch.no_grad()
    def _norms(self, network: Callable[[Tensor], Any]) -> list[Tensor]:
        """‖u − u*‖ and ‖u*‖ per field, (m,) each."""
        found = torch.cat([network(x) for x in self._x.split(_CHUNK)]).double()
        both = self._centered(found) - self._truth, self._truth
        return [(self._weights[:, None] * u.square()).sum(0).sqrt() for u in both]
