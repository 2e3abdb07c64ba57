r"""An integrator for what is not stiff: Dormand and Prince's order 5(4) pair.

Seven values of f and no linear system a step. It is stable up to h|λ| ≈ 3.3, λ the rates of f.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .adaptive import Of, Size, relative

_STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
#: the last stage, which is the step, less the formula of order four
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


@dataclass(frozen=True)
class Explicit:
    """y' = f(y) for B systems of n unknowns.

    Attributes:
        velocity: f.
        size: of errors, in units of the tolerance.
    """

    velocity: Of
    size: Size = field(default_factory=relative)
    order: int = 5

    def step(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """y after a step of h (B,), and its error in units of the tolerance, (B,)."""
        moved, slopes = y, [self.velocity(y)]
        for row in _STAGES:
            moved = y + h[:, None] * _combined(row, slopes)
            slopes.append(self.velocity(moved))
        return moved, self.size(y, moved, h[:, None] * _combined(_ERROR, slopes))


def _combined(weights: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    out = weights[0] * slopes[0]
    for weight, slope in zip(weights[1:], slopes[1:], strict=True):
        out = out + weight * slope
    return out
