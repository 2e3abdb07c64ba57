"""The natural direction R⁻¹ G C⁻¹."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ....grams.kronecker.inverse import Inverse, apply_inverse
from .rule import Rule


class Natural(Rule):
    r"""F̂⁻¹g: steepest descent for the length √(xᵀF̂x), with every parameter that has a block.

    `needs` says how: by "inverse" sides, in an "eigenbasis", or by solving with "factors" that
    serve one step.
    """

    matrices = False
    defaults: ClassVar = {
        "lr": 0.1,
        "fisher": "mc",
        "damping": 1e-3,
        "momentum": 0.9,
        "kl_clip": 1e-3,
        "ema": 0.95,
        "statistics_every": 10,
        "invert_every": 100,
    }

    def __init__(self, needs: str = "inverse") -> None:
        self.needs = needs

    def suited(self, *, once: bool, exact: bool) -> Rule:
        return Natural("eigenbasis" if exact else "factors" if once else "inverse")

    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        return apply_inverse(prepared, given)
