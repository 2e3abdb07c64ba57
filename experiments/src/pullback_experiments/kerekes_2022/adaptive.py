r"""Autonomous systems y' = f(y), many at once, each with a step size of its own.

A `Pair` is a formula and an estimate of its error; `march` repeats it until a clock says stop. How
large an error may be is not for the formula to say: a `Size` measures it in units of the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

#: y (B, n) ↦ (B, …), one value per system
Of = Callable[[Tensor], Tensor]

#: y before and after a step, and its error, (B, n) each ↦ the error in units of the tolerance, (B,)
Size = Callable[[Tensor, Tensor, Tensor], Tensor]


class Pair(Protocol):
    """A formula with an estimate of its error."""

    @property
    def order(self) -> int:
        """The error estimate falls as h^order."""
        ...

    def step(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """y (B, n) after a step of h (B,), and its error in units of the tolerance, (B,)."""
        ...


def relative(rtol: float = 1e-5, atol: Tensor | float = 1e-9) -> Size:
    """max_i |e_i| / (atol + rtol |y_i|); atol is one number or one per system, (B, 1)."""

    def size(y: Tensor, moved: Tensor, error: Tensor) -> Tensor:
        return (error.abs() / (atol + rtol * torch.maximum(y.abs(), moved.abs()))).amax(1)

    return size


def march(
    pair: Pair,
    y: Tensor,
    clock: Of,
    end: float,
    *,
    first: float = 1e-2,
    longest: float = 1.0,
    max_steps: int = 20_000,
    watch: Callable[[Tensor], None] = lambda clock: None,
) -> tuple[Tensor, Tensor]:
    """y where clock(y) (B,) reaches `end`, each system by itself, and which did not, (B,).

    The last step is shortened until it ends within a thousandth of 1 + |end|. It gives up after so
    many steps, or where a step has to be shorter than 1e-12 of the longest.
    """
    h, now, slack = torch.full_like(y[:, 0], first), clock(y), 1e-3 * (1 + abs(end))
    most = torch.full_like(h, 3.0)  # of growth; none right after a step was refused
    for count in range(max_steps):
        going = ~(now >= end)
        if not bool(going.any()) or bool((h < 1e-12 * longest).any()):
            break
        moved, error = pair.step(y, h)
        error = torch.where(torch.isfinite(error), error, 1e6)
        then = clock(moved)
        fine, past = error <= 1, then > end + slack
        change = (0.8 * error.clamp(min=1e-6) ** (-1 / pair.order)).clamp(min=0.2).minimum(most)
        back = ((end + 0.5 * slack - now) / (then - now)).clamp(0.1, 0.95)
        y = torch.where((fine & ~past & going)[:, None], moved, y)
        now = torch.where(fine & ~past & going, then, now)
        change = torch.where(fine & past, back, change)
        h = torch.where(going, (h * change).clamp(max=longest), h)
        most = torch.where(fine, 3.0, 1.0)
        if count % 20 == 0:
            watch(now)
    return y, ~(now >= end)
