"""Measured points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..sampling import Points, Sampler
from ..sampling import sampler as named
from .base import Predicate, Region, mask
from .checks import check_count, check_names, check_points, check_seed
from .patch import Patch


class PointSet(Region):
    """Given points x with weights that sum to 1, such as the places of measurements.

    Args:
        x: (N, d), or (N,) in one dimension.
        names: of the coordinates.
        weights: (N,), nonnegative; they are divided by their sum. Equal unless given.
    """

    def __init__(
        self, x: Tensor, names: Sequence[str] | None = None, weights: Tensor | None = None
    ) -> None:
        if isinstance(x, Tensor) and x.ndim == 1:
            x = x[:, None]
        dim = x.shape[1] if isinstance(x, Tensor) and x.ndim == 2 else len(names or "x")
        self.x = check_points(x, dim)
        if self.x.numel() == 0 or not self.x.isfinite().all():
            raise PullbackError(
                "PointSet needs points",
                f"got shape {tuple(self.x.shape)}" + " with non-finite entries" * bool(x.numel()),
                "Pass a finite tensor of shape (N, d) with N ≥ 1",
            )
        self.names = check_names(names, dim)
        self.weights = _weights(weights, len(self.x))
        self.low, self.high = self.x.amin(0), self.x.amax(0)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def measure(self) -> float:
        return float(self.weights.sum())

    def build(self) -> Sequence[Patch]:
        return tuple(
            Patch((), float(w), lambda u, x=x: (x.expand(len(u), -1), None))
            for x, w in zip(self.x, self.weights, strict=True)
        )

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return torch.cdist(x, self.x, p=torch.inf).amin(1) <= tol

    def sample(
        self, n: int | None = None, sampler: str | Sampler = "sobol", *, seed: int = 0
    ) -> Points:
        """All points; n must be their number, or None."""
        named(sampler)
        check_seed(seed)
        if n is not None and check_count(n) != len(self):
            raise PullbackError(
                f"{n} points were asked of a set of {len(self)}",
                "measured points cannot be drawn anew",
                f"Use n={len(self)} or n=None, or build PointSet from a part of them",
            )
        return Points(self.x, self.weights)

    def quadrature(self, n: int | None = None) -> Points:
        """All points, whatever n is."""
        return Points(self.x, self.weights)

    def where(self, predicate: Predicate) -> PointSet:
        chosen = mask(predicate, self.x)
        if not chosen.any():
            raise PullbackError(
                "No point of the set is left", "the predicate is false on all", "Change it"
            )
        part = PointSet(self.x[chosen], self.names)
        part.weights = self.weights[chosen]  # the measure is the accepted share
        return part

    def __repr__(self) -> str:
        return f"PointSet({len(self)} points of ({', '.join(self.names)}))"


def _weights(weights: Tensor | None, n: int) -> Tensor:
    """Nonnegative weights (N,) that sum to 1."""
    if weights is None:
        return torch.full((n,), 1 / n, dtype=torch.float64)
    w = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    if w.shape != (n,) or not w.isfinite().all() or (w < 0).any() or not w.sum() > 0:
        raise PullbackError(
            "The weights do not fit the points",
            f"got shape {tuple(w.shape)} for {n} points, or negative, zero or non-finite ones",
            f"Pass {n} weights ≥ 0",
        )
    return w / w.sum()
