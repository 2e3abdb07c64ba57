"""Retractions: from w − η x back to where the parameters may be.

A retraction of one parameter is a function of its tensor; of the whole model, a function of the
dict of parameters. `retraction` turns either, or a dict of the former, into the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError

Retraction = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


class Bounds:
    """Clip every entry to [lower, upper]."""

    def __init__(self, lower: float = -torch.inf, upper: float = torch.inf) -> None:
        self.lower = lower
        self.upper = upper

    def __call__(self, w: Tensor) -> Tensor:
        return w.clamp(self.lower, self.upper)


class Sphere:
    """Backprojection onto the sphere of a given radius about the origin."""

    def __init__(self, radius: float = 1.0) -> None:
        self.radius = radius

    def __call__(self, w: Tensor) -> Tensor:
        return w * (self.radius / w.norm().clamp(min=torch.finfo(w.dtype).tiny))


class PositiveDefinite:
    """Symmetric matrices with eigenvalues ≥ floor.

    A Cholesky factorization of W − floor decides whether W is inside already; only if it fails
    are the eigenvalues raised to the floor.
    """

    def __init__(self, floor: float = 1e-8) -> None:
        self.floor = floor

    def __call__(self, w: Tensor) -> Tensor:
        w = (w + w.mT) / 2
        eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
        if not bool(torch.linalg.cholesky_ex(w - self.floor * eye).info.any()):
            return w
        values, vectors = torch.linalg.eigh(w)
        return (vectors * values.clamp(min=2 * self.floor)[..., None, :]) @ vectors.mT


def retraction(spec: Any, names: tuple[str, ...]) -> Retraction:
    """One retraction of the parameter dict from a function or a dict of functions by name."""
    if not isinstance(spec, Mapping):
        return spec
    unknown = set(spec) - set(names)
    if unknown:
        raise PullbackError(
            "retract= names parameters that do not exist",
            f"{sorted(unknown)} are not among the optimized parameters",
            "Use the names of model.named_parameters()",
        )
    return lambda params: {n: spec[n](p) if n in spec else p for n, p in params.items()}
