"""The contract of a direction rule, and the natural direction R⁻¹ G C⁻¹."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ....grams.kronecker.inverse import Inverse, apply_inverse


class Rule(ABC):
    """How a gradient becomes a direction.

    Attributes:
        needs: what is prepared per block: "inverse" sides, Cholesky "factors", or "eigenbasis".
    """

    needs: str = "inverse"

    @abstractmethod
    def directions(self, prepared: Inverse, given: Sequence[Tensor]) -> list[Tensor]:
        """Return directions for stacked gradients.

        Args:
            prepared: of B blocks of one shape.
            given: weights (B, O, I) and perhaps biases (B, O); for units one tensor (k, U).
        """


class Natural(Rule):
    """F̂⁻¹g: by inverse sides, in eigenbases, or by solving with factors that serve one step."""

    def __init__(self, needs: str = "inverse") -> None:
        self.needs = needs

    def directions(self, prepared: Inverse, given: Sequence[Tensor]) -> list[Tensor]:
        return apply_inverse(prepared, given)
