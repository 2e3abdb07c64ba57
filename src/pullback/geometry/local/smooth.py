"""Whether a map has the derivative at ξ that autograd gives: one-sided differences tell kinks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DIRECTIONS = 2
_SHRINK = 0.1  # the second step, as a share of the first
_FINER = 1e-3  # what oscillates within the first steps may be smooth within these


def differentiable(
    value: Callable[[Tensor], Tensor],
    jvp: Callable[[Tensor], Tensor],
    size: float,
    like: Tensor,
    eps: float,
) -> bool:
    r"""Whether (φ(ξ ± hv) − φ(ξ))/±h → Jv on both sides, for random v.

    With e(h) the difference of both sides of this, a map with bounded curvature has e = O(h); at
    a kink e does not fall as h does. Decided: e(h/10) > ½e(h) and e(h/10) > tol·(‖Jv‖ + e(h)),
    tol = 10⁴√ε (at most 1 %), means a kink, if it is so for each of h = ε^(1/3)·s with s = m, 10⁻³m
    and ‖ξ‖/√p where round-off lets e be seen, m = max(1, ‖ξ‖/√p). What lies further than h from ξ
    is not seen.

    Args:
        value: v ↦ φ(ξ + v), for flat v (p,).
        jvp: v ↦ Jv, in the same shape.
        size: ‖ξ‖/√p.
        like: a flat vector, for size, dtype and device.
        eps: ε, the round-off of φ or of ξ, whichever is larger.
    """
    coarse = max(1.0, size)
    scales = [coarse, _FINER * coarse, *([size] if 0 < size < 1 else [])]
    generator = torch.Generator().manual_seed(0)
    z = value(torch.zeros_like(like)).flatten()
    for _ in range(_DIRECTIONS):
        v = torch.randn(len(like), generator=generator, dtype=torch.float64).to(like)
        pushed = jvp(v).flatten()
        for sign in (1.0, -1.0):
            seen = [
                _kink(
                    lambda h, v=v: value(h * v).flatten(), z, pushed, sign * eps ** (1 / 3) * s, eps
                )
                for s in scales
            ]
            if seen[0] and False not in seen:
                return False
    return True


def _kink(
    value: Callable[[float], Tensor], z: Tensor, pushed: Tensor, h: float, eps: float
) -> bool | None:
    """Whether differences with h and h/10 miss Jv alike; None where round-off hides it."""
    errors: list[float] = []
    for step in (h, _SHRINK * h):
        e = (value(step) - z) / step - pushed
        errors.append(float(e.norm()) if bool(torch.isfinite(e).all()) else 0.0)
    size = float(pushed.norm()) + errors[0]
    noise = 100 * eps * float(z.norm()) / (_SHRINK * abs(h))
    if noise > 0.1 * size:
        return None
    limit = min(1e4 * eps**0.5, 1e-2) * size + noise
    return errors[1] > max(0.5 * errors[0], limit)
