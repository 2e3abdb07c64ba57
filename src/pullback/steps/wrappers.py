"""Steps around other steps, and retractions: from w − η x back to where the parameters may be.

A retraction of one parameter is a function of its tensor; of the whole model, a function of the
dict of parameters. `retraction` turns either, or a dict of the former, into the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from ..solvers import Damping, Solution
from .base import Constant, Local, Move, Step, positive
from .trust import clip_factor


class Wrapper(Step):
    """A step whose inner step works with another direction."""

    def __init__(self, step: Step | None = None) -> None:
        self.inner = Constant() if step is None else step
        self.initial_lr = self.inner.initial_lr

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        """The direction the inner step sees."""
        raise NotImplementedError(type(self).__name__)

    def take(self, local: Local) -> Move:
        assert self.inner is not None
        inner = replace(
            local,
            solve=lambda damping, about: self.solution(local, damping, about),
            path=lambda: None,
            state=local.state.setdefault("inner", {}),
        )
        return self.inner.take(inner)


class Clip(Wrapper):
    """Every entry of the direction is cut to [−bound, bound]."""

    def __init__(self, bound: float, step: Step | None = None) -> None:
        super().__init__(step)
        self.bound = positive("Clip(bound)", bound)

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        found = local.solve(damping, about)
        return replace(found, x=found.x.clamp(-self.bound, self.bound))


class TrustNorm(Wrapper):
    """The move's length in the pullback metric stays below √limit: (lr·x)ᵀG(lr·x) ≤ limit.

    With the Fisher metric this is the KL clip.
    """

    def __init__(self, limit: float, step: Step | None = None) -> None:
        super().__init__(step)
        self.limit = positive("TrustNorm(limit)", limit)

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        found = local.solve(damping, about)
        move = local.scaled(found.x)
        return replace(found, x=found.x * clip_factor(move @ local.image(move), self.limit))


class Spring(Wrapper):
    r"""Momentum in the null space: x minimizes ‖A x − r‖² + λ‖x − μ x_prev‖².

    The part of the last direction that the current samples say nothing about is kept, the rest
    is solved for.
    """

    def __init__(self, momentum: float = 0.9, step: Step | None = None) -> None:
        super().__init__(step)
        self.momentum = momentum

    @property
    def numbers(self) -> dict[str, float]:
        return {"count": 0}

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("previous",)

    def solution(self, local: Local, damping: Damping | None, about: Tensor | None) -> Solution:
        if local.state.get("count"):
            kept = self.momentum * local.state["previous"].to(local.gradient)
            about = kept if about is None else about + kept
        return local.solve(damping, about)

    def take(self, local: Local) -> Move:
        move = super().take(local)
        if move.accepted:
            count = local.state.get("count", 0) + 1
            local.state |= {"previous": move.direction.clone(), "count": count}
        else:  # no damping shortens it: kept, it would spoil every later step
            local.state |= {"previous": torch.zeros_like(local.gradient), "count": 0}
        return move


Retraction = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


class Bounds:
    """Clip every entry to [lower, upper]."""

    def __init__(self, lower: float = -torch.inf, upper: float = torch.inf) -> None:
        self.lower, self.upper = lower, upper

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
