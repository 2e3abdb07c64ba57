"""Numerical inverses of functions: safeguarded Newton, by entry or for a vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, jvp

from ..._core.errors import PullbackError

_LARGEST = 2048  # side of the largest matrix that Newton factorizes
_ROUNDS = 200


def elementwise_root(function: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    """θ with f(θ_i) = w_i for a strictly monotone f: brackets that grow, then Newton or bisection.

    Works in float64, and returns the dtype of w.
    """
    target = w.detach().to(torch.float64)
    one = torch.ones_like(target)

    def value(t: Tensor) -> Tensor:
        found = function(t)
        if found.shape != target.shape or found.is_complex():
            raise _unsolved(f"f of {tuple(target.shape)} is {found.dtype} {tuple(found.shape)}")
        return found - target

    # the slope between two points apart tells rising from falling, also where f' vanishes
    rising = torch.sign(value(one) - value(-one))
    low, high = _bracket(value, target, rising)
    theta = 0.5 * (low + high)
    for _ in range(_ROUNDS):
        pair: Any = jvp(value, (theta,), (one,))
        gap, slope = pair
        above = gap * rising > 0
        low, high = torch.where(above, low, theta), torch.where(above, theta, high)
        step = theta - gap / slope
        inside = (step > low) & (step < high)  # false where the slope is zero
        moved = torch.where(inside, step, 0.5 * (low + high))
        # at an end of its bracket Newton has arrived: the midpoint would leave it again
        moved = torch.where((gap == 0) | (step == theta), theta, moved)
        if bool((moved == theta).all()):
            break
        theta = moved
    scale = target.abs() + 1
    if not bool((value(theta).abs() <= 1e-9 * scale).all()):
        raise _unsolved(f"an entry stayed {float((value(theta).abs() / scale).max()):.1e} away")
    return theta.to(w.dtype)


def _bracket(
    value: Callable[[Tensor], Tensor], target: Tensor, rising: Tensor
) -> tuple[Tensor, Tensor]:
    """low < θ < high with f on both sides of w, growing from one another by doubling."""
    low, high = -torch.ones_like(target), torch.ones_like(target)
    for _ in range(60):
        over, under = value(low) * rising > 0, value(high) * rising < 0
        if not bool(over.any() or under.any()):
            finite = torch.isfinite(value(low)) & torch.isfinite(value(high))
            known = ~(torch.isnan(value(low)) | torch.isnan(value(high)))
            if bool((finite | known).all()) and bool((rising != 0).all()):
                return low, high
            break
        low, high = torch.where(over, 2 * low, low), torch.where(under, 2 * high, high)
    raise _unsolved("some weights are outside its range, or it is not monotone")


def newton_root(function: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    """θ with f(θ) = w, (p,), by Newton from θ = w and halved steps; the matrix is dense."""
    if len(w) > _LARGEST:
        raise PullbackError(
            "The diffeomorphism has no inverse",
            f"none was given, and Newton's matrix would have side {len(w)} > {_LARGEST}",
            "Give the inverse: Custom(f, inverse)",
        )
    target = w.detach()
    theta, eps = target.clone(), torch.finfo(w.dtype).eps
    gap = function(theta) - target
    for _ in range(_ROUNDS):
        if not bool(gap.norm() > 4 * eps * (target.norm() + 1)):
            break
        step, info = torch.linalg.solve_ex(jacrev(function)(theta), gap)
        if int(info) or not bool(torch.isfinite(step).all()):
            raise _unsolved("its derivative is singular on the way")
        size = 1.0
        while size > 1e-6:
            trial = theta - size * step
            now = function(trial) - target
            if bool(now.norm() < gap.norm()):
                break
            size *= 0.5
        else:
            break
        theta, gap = trial, now
    if not bool(gap.norm() <= 1e3 * eps * (target.norm() + 1)):
        raise _unsolved(f"the search ended at a distance of {float(gap.norm()):.1e}")
    values = torch.linalg.svdvals(jacrev(function)(theta))
    if len(values) and not bool(values[-1] > len(w) * eps * values[0]):
        raise _unsolved("its derivative is singular at the root")
    return theta


def _unsolved(why: str) -> PullbackError:
    return PullbackError(
        "The diffeomorphism could not be inverted",
        f"no θ with f(θ) = w was found: {why}",
        "Use a function whose range has all weights, or give its inverse",
    )
