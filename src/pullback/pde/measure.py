"""The relative L² error of a network against what is known of the solution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .problem import Problem

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

    @torch.no_grad()
    def errors(self, network: Callable[[Tensor], Any]) -> dict[str, float]:
        """‖u − u*‖/‖u*‖ per field."""
        found = torch.cat([network(x) for x in self._x.split(_CHUNK)]).double()
        difference = self._centered(found) - self._truth
        off, size = (self._norm(v) for v in (difference, self._truth))
        return dict(zip(self.problem.fields, (off / size).tolist(), strict=True))

    @torch.no_grad()
    def error(self, network: Callable[[Tensor], Any]) -> float:
        """The same for all fields together."""
        found = torch.cat([network(x) for x in self._x.split(_CHUNK)]).double()
        difference = self._centered(found) - self._truth
        return float(self._norm(difference).norm() / self._norm(self._truth).norm())

    def _norm(self, u: Tensor) -> Tensor:
        return (self._weights[:, None] * u.square()).sum(0).sqrt()
